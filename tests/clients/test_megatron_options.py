"""Options of Megatron that lean on the layers: recomputation, gradients added in place, experts."""

import pytest
import torch

from ..common.megatron_runs import NEVER_CLIPPED, STEPS, error_of_training, losses_and_norms

RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    **{
        module: {"recompute_granularity": "selective", "recompute_modules": [module]}
        for module in ("core_attn", "mlp", "layernorm")
    },
}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
NOT_RANDOM = {"hybrid": "crossgrain.recipe.zoo.mxfp8_fwd_high_precision_bwd_factory"}


@pytest.mark.parametrize("recipe", ["none", "mxfp8", "delayed", "nvfp4", "hybrid"])
def test_recomputation_changes_no_bit(recipe, megatron):
    """Megatron refuses norms with delayed scaling. Of an MLP in high precision it takes its own checkpoint, whose
    backward calls itself without end if the MLP returns a bias, be it of its own layers or ours.
    """
    [kept] = megatron(losses_and_norms, 1, {"recipe": recipe})
    for name, config in RECOMPUTED.items():
        if (recipe, name) not in (("delayed", "layernorm"), ("none", "mlp")):
            assert megatron(losses_and_norms, 1, {"recipe": recipe, "config": config}) == [kept], name


def test_megatron_refuses_to_compute_norms_again_with_delayed_scaling(megatron):
    [(kind, text)] = megatron(error_of_training, 1, {"recipe": "delayed", "config": RECOMPUTED["layernorm"]})
    assert kind == "ValueError" and "Delayed scaling does not support" in text


@pytest.mark.parametrize("recipe", ["none", "mxfp8", "hybrid"])
def test_gradients_added_to_main_grad_in_place(recipe, megatron):
    """In float32, where nothing is rounded on the way, no bit differs. Two microbatches: the second adds."""
    options = {"recipe": recipe, "bf16": False, "microbatches": 2}
    [apart] = megatron(losses_and_norms, 1, options)
    [in_place] = megatron(losses_and_norms, 1, {**options, "config": {"gradient_accumulation_fusion": True}})
    assert in_place == apart


@pytest.mark.parametrize("recipe", ["none", "tensorwise", "mxfp8", "hybrid"])
def test_experts_in_one_grouped_layer_compute_what_experts_one_by_one_do(recipe, megatron):
    [(grouped, one_by_one)] = megatron(both_kinds_of_experts, 1, recipe)
    assert grouped == one_by_one
    assert grouped[-1] < 0.8 * grouped[0]


def both_kinds_of_experts(rank, recipe):
    import small_gpt

    built = []
    for grouped in (True, False):
        config = {**EXPERTS, "add_bias_linear": False, "moe_grouped_gemm": grouped}
        if recipe in NOT_RANDOM:  # what is rounded at random follows the order in which experts are computed
            config["fp8_quantizer_factory"] = NOT_RANDOM[recipe]
        options = small_gpt.Options(recipe=recipe, config=config, clip_grad=NEVER_CLIPPED)
        built.append((*small_gpt.build(options), options))
    grouped, alone = (dict(model.named_parameters()) for model, _, _ in built)
    with torch.no_grad():
        for name, parameter in alone.items():
            before, is_expert, after = name.partition("experts.local_experts.")
            index, _, layer = after.partition(".")
            parameter.copy_(grouped[f"{before}experts.{layer}{index}" if is_expert else name])
    built[1][1].reload_model_params()
    return tuple([loss for loss, _ in small_gpt.run(*each, STEPS)] for each in built)


@pytest.mark.parametrize("recipe, tolerance", [("none", 1e-6), ("mxfp8", 1e-3)])
def test_experts_over_two_ranks_compute_what_all_of_them_on_each_do(recipe, tolerance, megatron):
    """Gradients of an expert are added up in another order, in float32; later a few numbers get other codes."""
    (start, everywhere), _ = megatron(train_experts, 2, recipe, 1, None)
    for _, shared in megatron(train_experts, 2, recipe, 2, start):
        assert shared[0] == pytest.approx(everywhere[0], rel=1e-6)
        assert shared == pytest.approx(everywhere, rel=tolerance)


def train_experts(rank, recipe, ranks, start):
    """The parameters at first, those of ``start`` if given, and losses."""
    import small_gpt

    config = {**EXPERTS, "add_bias_linear": False, "moe_grouped_gemm": True, "expert_model_parallel_size": ranks}
    options = small_gpt.Options(recipe=recipe, bf16=False, config=config, clip_grad=NEVER_CLIPPED)
    model, optimizer = small_gpt.build(options)
    first = rank * 4 // ranks if ranks > 1 else 0
    with torch.no_grad():
        for name, parameter in model.named_parameters() if start is not None else ():
            before, is_expert, index = name.partition(".weight") if ".experts." in name else (name, "", "")
            parameter.copy_(start[f"{before}.weight{first + int(index)}" if is_expert else name])
    optimizer.reload_model_params()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return parameters, [loss for loss, _ in small_gpt.run(model, optimizer, options, STEPS)]
