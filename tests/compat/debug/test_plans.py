"""What features say about a layer, as a plan."""

from crossgrain.compat.debug.plans import plan_of
from crossgrain.planes import COLUMNWISE, ROWWISE

IDLE = {"fp8_gemm_enabled": (True, None)}


def asked(answers):
    def ask(call, **about):
        return answers.get((call, *sorted(about.values())), answers.get(call, (False, None)))

    return ask


def test_a_layer_that_nobody_wants_anything_of_is_idle_for_ever():
    plan, upcoming = plan_of("fc1", 3, asked(IDLE))
    assert plan.is_idle and upcoming is None and plan.numbers is None


def test_the_next_step_is_the_earliest_of_all_answers():
    later = {("inspect_tensor_enabled", "output"): (False, 9), ("inspect_tensor_enabled", "weight"): (False, 7)}
    plan, upcoming = plan_of("fc1", 3, asked(IDLE | later))
    assert plan.is_idle and upcoming == 7


def test_an_answer_without_a_next_step_is_asked_for_again():
    plan, upcoming = plan_of("fc1", 3, asked(IDLE | {"modify_tensor_enabled": False}))
    assert plan.is_idle and upcoming == 4


def test_gemms_that_are_not_quantized_concern_both_of_their_operands():
    plan, _ = plan_of("fc1", 0, asked(IDLE | {("fp8_gemm_enabled", "dgrad"): (False, 1)}))
    assert plan.ways["gradient"] == {ROWWISE: "high precision", COLUMNWISE: "recipe"}
    assert plan.ways["weight"] == {ROWWISE: "recipe", COLUMNWISE: "high precision"}
    assert plan.changed == ["weight", "gradient"] and plan.numbers is not None and not plan.is_idle


def test_what_a_feature_makes_comes_before_high_precision():
    answers = {"fp8_gemm_enabled": (False, 1), ("modify_tensor_enabled", "activation", "wgrad"): (True, 1)}
    plan, _ = plan_of("fc1", 0, asked(answers))
    assert plan.ways["activation"] == {ROWWISE: "high precision", COLUMNWISE: "feature"}


def test_results_and_tensors_to_look_at_are_noted():
    answers = {
        ("modify_tensor_enabled", "fprop", "output"): (True, 1),
        ("inspect_tensor_enabled", "wgrad"): (True, 1),
        ("inspect_tensor_postquantize_enabled", "fprop", "weight"): True,
    }
    plan, _ = plan_of("fc1", 0, asked(IDLE | answers))
    assert plan.modified == {"output"} and plan.inspected == {"wgrad"}
    assert plan.inspected_later == {("weight", ROWWISE)} and not plan.changed
