"""Steps with planted causes: the replay names exactly them."""

import json

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import crossgrain as cg
from crossgrain.lab import replay
from crossgrain.nn import GroupedLinear, Linear
from crossgrain.recipe import DelayedScaling, GemmRecipe

from .small import (
    DELAYED_AND_RANDOM,
    DELAYED_DGRAD,
    Roots,
    Small,
    batches,
    loss_fn,
    mean_loss,
    ones_but_one,
    site,
    trained,
    with_stale_scale,
)

OPERANDS = ("fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")
FOUR_BITS = "fprop: nvfp4, dgrad: hp, wgrad: hp"


def roots(*names, recipe=FOUR_BITS):
    model = Roots(*names)
    cg.convert(model, recipe)
    return model


# ---- one operand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operand", OPERANDS)
def test_an_operand_with_a_stale_scale_is_named(operand):
    recipe = f"mxfp8, allow_mixed: true; blocks.1.up: {operand}: fp8(delayed(history=4))"
    model, _, batch = with_stale_scale("blocks.1.up", recipe=recipe, states=("scaling_fwd", "scaling_bwd"))
    result = replay(model, [batch], loss_fn)
    assert result.verdict == "one operand" and result.culprits == [site(f"blocks.1.up: {operand}")], str(result)
    assert result.share > 0.7 and result.alone > 0.7


def test_a_stale_scale_of_a_gradient_is_named():
    model, optimizer, batch = with_stale_scale("blocks.1.down")
    result = replay(model, [batch], loss_fn, optimizer=optimizer)
    culprit = site("blocks.1.down: dgrad.grad_output")
    assert result.verdict == "one operand" and result.culprits == [culprit] and result.complete, str(result)
    assert result.measure == "gradient"  # forward is as it should be
    rounding = result.roundings[culprit]
    assert rounding.cut_off == rounding.numbers and rounding.largest > 1000 * rounding.largest_after
    assert max(result.parameters, key=lambda name: result.parameters[name][2]) == "blocks.1.up.weight"
    assert result.low.loss_after > result.high.loss_after
    shown = str(result)
    assert "One operand makes the difference in the gradient: dy of blocks.1.down, rowwise, dgrad.grad_output." in shown
    assert "100 % of its numbers were cut off" in shown
    assert "In a recipe: blocks.1.down: dgrad: hp" in shown


def test_a_loss_that_jumps_is_what_is_explained():
    recipe = "mxfp8, allow_mixed: true; out: fprop.input: fp8(delayed(history=4))"
    model, _, batch = with_stale_scale("out", recipe=recipe, states=("scaling_fwd",))
    result = replay(model, [batch], loss_fn)
    assert result.measure == "loss" and result.culprits == [site("out: fprop.input")], str(result)
    assert replay(model, [batch], loss_fn, measure="gradient norm").culprits == result.culprits


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_makes_no_difference(use_reentrant):
    results = []
    for recompute in (None, use_reentrant):
        model, _, batch = with_stale_scale("blocks.1.down", recipe=DELAYED_AND_RANDOM)
        model.recompute = recompute
        results.append(replay(model, [batch], loss_fn))
    plain, recomputed = results
    assert recomputed.culprits == [site("blocks.1.down: dgrad.grad_output")]
    assert recomputed.low == plain.low and recomputed.high == plain.high and recomputed.share == plain.share
    assert recomputed.kinds == plain.kinds and recomputed.other_draws == plain.other_draws


def test_the_rules_of_a_result_repair_the_step():
    model, _, batch = with_stale_scale("blocks.1.down")
    result = replay(model, [batch], loss_fn)
    assert result.rules == ["blocks.1.down: dgrad: hp"]
    cg.convert(model, GemmRecipe.load("; ".join([str(model.out.bound_recipe), *result.rules])))
    again = replay(model, [batch], loss_fn)
    assert again.low.distance < 0.3 * result.low.distance


def test_an_outlier_in_the_input_of_experts_is_named():
    torch.manual_seed(0)
    experts, x, sizes = GroupedLinear(3, 32, 32, name="experts"), torch.randn(96, 32), [32, 0, 64]
    head = Linear(32, 32, name="head")
    x[40, 3] = 1e6

    def of_experts(model, x):
        with cg.autocast(recipe="fprop: fp8, dgrad: mxfp8, wgrad: mxfp8"):
            return model[1](model[0](x, sizes).tanh()).square().mean()

    result = replay(nn.ModuleList([experts, head]), [x], of_experts)
    assert result.culprits == [site("experts: fprop.input")], str(result)
    assert result.roundings[result.culprits[0]].lost > 60 * 32  # of the third expert, all but the outlier


# ---- several, none, chance ---------------------------------------------------------------------------------------


def test_two_operands_are_named_together():
    model, _, batch = with_stale_scale("blocks.1.down", "blocks.2.up")
    result = replay(model, [batch], loss_fn)
    names = {"blocks.1.down: dgrad.grad_output", "blocks.2.up: dgrad.grad_output"}
    assert result.verdict == "several operands" and set(map(str, result.culprits)) == names, str(result)
    assert result.share > 0.8 and max(one.share for one in result.operands) < 0.8


def test_both_operands_of_two_gemms_are_named_together():
    """Each of the four is enough to spoil its GEMM, so that raising one of them alone changes nothing."""
    model, _, batch = with_stale_scale("blocks.1.down", "blocks.2.up", states=("scaling_fwd", "scaling_bwd"))
    result = replay(model, [batch], loss_fn)
    layers, tensors = ("blocks.1.down", "blocks.2.up"), ("grad_output", "weight")
    assert set(map(str, result.culprits)) == {f"{layer}: dgrad.{tensor}" for layer in layers for tensor in tensors}
    assert result.rules == [f"{layer}: dgrad: hp" for layer in layers] and max(result.kinds.values()) < 0.1


def test_a_healthy_step_is_the_sum_of_many_parts():
    model, _, batch = trained("mxfp8")
    result = replay(model, [batch], loss_fn)
    assert result.verdict == "spread" and not result.culprits and not result.rules
    assert "No few operands make the difference in the gradient: it is the sum of many parts." in str(result)


def test_formats_that_round_nothing_make_no_difference():
    """Dropout draws the same numbers in all runs; otherwise there were a difference."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Dropout(0.5))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    cg.convert(model, "mxfp8, dgrad: mxint8(sr)", include=["0"])
    result = replay(model, [torch.ones(32, 32, requires_grad=True)], lambda model, x: model(x).sum())
    assert result.verdict == "no difference" and result.low.distance == 0
    assert "There is no difference to explain: the gradient is that of high precision" in str(result)


def test_an_unlucky_draw_is_chance_and_a_lucky_one_no_difference():
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[0, :16] = torch.tensor([0.95, -0.7, *[0.0] * 13, 1.0])  # 0.25 is left, seldom less than 0
    cg.convert(model, f"{FOUR_BITS}, fprop.weight: nvfp4(sr)", include=["0"])
    verdicts = {}
    for seed in range(12):
        torch.manual_seed(seed)
        result = replay(model, [ones_but_one()], lambda model, x: model(x)[:, 0].sqrt().mean(), redraws=1)
        verdicts.setdefault(result.verdict, result)
    assert verdicts["chance"].low.nonfinite and not verdicts["chance"].other_draws[0].nonfinite
    assert "It was chance: with other draws of stochastic rounding, 0 % of the difference" in str(verdicts["chance"])
    assert not verdicts["spread" if "spread" in verdicts else "one operand"].low.nonfinite


# ---- NaNs and infinities -----------------------------------------------------------------------------------------


def test_the_operand_that_makes_nans_is_named():
    result = replay(roots("a"), [ones_but_one()], mean_loss)
    assert result.measure == "nonfinite" and result.low.nonfinite and not result.high.nonfinite
    assert result.verdict == "one operand" and result.culprits == [site("a: fprop.weight")]
    assert "One operand makes the difference in the NaNs and infinities" in str(result)
    json.dumps(result.to_dict(), allow_nan=False)


def test_several_operands_each_of_which_is_enough_for_a_nan_are_found():
    result = replay(roots("a", "b", "c"), [ones_but_one()], mean_loss, measure="loss")
    assert all(one.share == 0 for one in result.operands)
    assert set(map(str, result.culprits)) == {f"{name}: fprop.weight" for name in "abc"}, str(result)
    assert result.verdict == "several operands" and result.share == 1.0


def test_it_is_said_where_nans_come_up_first():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.roots, self.last = Roots("a"), nn.Linear(32, 32)

        def forward(self, x):
            return self.last(self.roots(x))

    model = Later()
    cg.convert(model, FOUR_BITS, include=["last"])
    result = replay(model, [ones_but_one()], mean_loss)
    assert result.first_nonfinite == (site("last: fprop.input"), True)
    assert "come up first in x of last, rowwise, fprop.input, before it was quantized" in str(result)
    assert result.culprits == [site("roots.a: fprop.weight")]


def test_nans_that_layers_refuse_are_the_end_of_a_run():
    class Later(Roots):
        def __init__(self):
            super().__init__("a")
            self.last = nn.Linear(32, 32)

        def forward(self, x):
            return self.last(super().forward(x))

    model = Later()
    cg.convert(model, f"{FOUR_BITS}, nonfinite: raise", include=["last"])
    result = replay(model, [ones_but_one()], mean_loss)
    assert result.culprits == [site("a: fprop.weight")]
    assert "As it was, the step ended early: last, input: 1024 of 1024 numbers are NaN" in str(result)


def test_nans_that_high_precision_has_as_well_are_nobodys_fault():
    model, _, batch = trained("mxfp8")
    with torch.no_grad():
        model.out.bias[0] = torch.nan
    result = replay(model, [batch], loss_fn)
    assert result.verdict == "not precision" and result.runs == 3
    assert "the formats of this step did not make them" in str(result)


# ---- how models are run ------------------------------------------------------------------------------------------


def test_layers_without_names_in_an_autocast_are_named_by_their_paths():
    torch.manual_seed(0)
    model = nn.Sequential(Linear(32, 32), nn.GELU(), Linear(32, 32))
    recipe = DelayedScaling(amax_history_len=4)

    def in_autocast(model, x):
        with cg.autocast(recipe=recipe):
            return model(x).square().mean()

    x = torch.randn(32, 32)
    in_autocast(model, x).backward()
    model[2].fp8_meta["scaling_fwd"].scale[0] *= 1e6
    result = replay(model, [x], in_autocast)
    assert {culprit.layer for culprit in result.culprits} == {"2"}, str(result)
    assert "fprop.input" in {culprit.operand for culprit in result.culprits}
    assert [model[at].name for at in (0, 2)] == [None, None]


def test_compiled_models_run_as_they_are_written():
    model, _, batch = trained(DELAYED_DGRAD)
    model.compile(backend="eager")
    loss_fn(model, batch).backward()
    model.blocks[1].down.fp8_meta["scaling_bwd"].delayed.scale.mul_(1e4)
    assert replay(model, [batch], loss_fn).culprits == [site("blocks.1.down: dgrad.grad_output")]


def test_gradients_of_microbatches_add_up():
    model, _, _ = trained("mxfp8")
    first, second = batches(2, seed=3)
    result = replay(model, [first, second], lambda model, batch: loss_fn(model, batch) / 2)
    total = sum(loss_fn(model, batch) / 2 for batch in (first, second))
    total.backward()
    norm = torch.cat([own.grad.flatten() for own in model.parameters()]).double().norm()
    assert result.low.gradient_norm == pytest.approx(float(norm), rel=1e-6)  # other orders of summation
    assert result.low.loss == pytest.approx(float(total.detach()), rel=1e-6)


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_gradients_that_do_not_go_through_autograd_are_seen(option):
    def step(**options):
        torch.manual_seed(0)
        layer = Linear(32, 32, bias=False, name="fc", **options)
        layer.weight.main_grad = torch.full((32, 32), 7.0) if "fuse_wgrad_accumulation" in options else None
        result = replay(layer, [torch.randn(32, 32)], in_autocast)
        assert "fuse_wgrad_accumulation" not in options or bool((layer.weight.main_grad == 7).all())
        return result

    def in_autocast(model, x):
        with cg.autocast(recipe="mxfp8"):
            return model(x).square().mean()

    plain, other = step(), step(**{option: True})
    assert plain.low.gradient_norm == other.low.gradient_norm > 0
    assert plain.operands == other.operands


def test_weights_that_are_kept_quantized_are_said_to_be_left_out():
    with cg.quantized_model_init(recipe="mxfp8"):
        layer = Linear(32, 32, name="fc")

    def in_autocast(model, x):
        with cg.autocast(recipe="mxfp8"):
            return model(x).square().mean()

    result = replay(layer, [torch.randn(32, 32)], in_autocast)
    assert {left.operand for left in result.not_examined} == {"fprop.weight"}
    assert "Not raised, not even in high precision: fc, fprop.weight: the weight is kept quantized" in str(result)


def test_the_loss_of_the_training_run_is_compared():
    model, _, batch = trained("mxfp8")
    loss = float(loss_fn(model, batch).detach())
    assert "exactly that of the training run" in str(replay(model, [batch], loss_fn, expected_loss=loss))
    assert "IT IS NOT THE STEP OF THE TRAINING RUN" in str(replay(model, [batch], loss_fn, expected_loss=loss + 1e-7))


def test_a_limit_of_runs_is_kept_and_said():
    model, _, batch = with_stale_scale("blocks.1.down")
    result = replay(model, [batch], loss_fn, runs=10)
    assert result.runs <= 10 and result.verdict == "unfinished"
    assert "NOT FINISHED: the limit of 10 runs ended the search" in str(result)
    assert result.kinds["dgrad.grad_output"] > 0.8


def test_a_culprit_that_is_found_before_the_limit_is_said_to_be_not_all():
    model, _, batch = with_stale_scale("blocks.1.down", "blocks.2.up")
    result = replay(model, [batch], loss_fn, runs=15)
    assert result.verdict == "one operand" and not result.complete
    shown = str(result)
    assert "One operand makes 75 % of the difference in the gradient: dy of blocks.1.down" in shown
    assert "NOT FINISHED: the limit of 15 runs ended the search, and other operands may make a part" in shown


def test_ctrl_c_keeps_what_is_known():
    model, _, batch = with_stale_scale("blocks.1.down")

    def stop(part, text):
        if "3 of 42" in text:
            raise KeyboardInterrupt

    result = replay(model, [batch], loss_fn, on_progress=stop)
    assert result.interrupted and result.verdict == "unfinished" and len(result.kinds) == 6
    assert "NOT FINISHED: Ctrl-C ended the search" in str(result)


def test_results_are_plain_data():
    model, optimizer, batch = trained("nvfp4")
    result = replay(model, [batch], loss_fn, optimizer=optimizer, redraws=1)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["verdict"] == result.verdict and data["low"]["loss"] == result.low.loss
    assert len(data["other_draws"]) == 1 and set(data["kinds"]) == set(OPERANDS)


def test_mistakes():
    model, optimizer, batch = trained("mxfp8")
    with pytest.raises(ValueError, match="measure must be auto, loss, "):
        replay(model, [batch], loss_fn, measure="accuracy")
    with pytest.raises(ValueError, match="runs must be at least 8, got 2"):
        replay(model, [batch], loss_fn, runs=2)
    with pytest.raises(TypeError, match=r"mostly one: \[batch\]; got Tensor"):
        replay(model, batch, loss_fn)
    with pytest.raises(ValueError, match="update needs the optimizer"):
        replay(model, [batch], loss_fn, update=optimizer.step)
    with pytest.raises(ValueError, match="not known without the optimizer"):
        replay(model, [batch], loss_fn, measure="loss after the update")
    with pytest.raises(ValueError, match="no operand of a GEMM was quantized in this step"):
        replay(Small(), [batch], loss_fn)
    with pytest.raises(ValueError, match="loss_fn must return one number, as a tensor, got 3"):
        replay(model, [batch], lambda model, batch: 3)
    with pytest.raises(ValueError, match="the loss depends on no parameter"):
        replay(model, [batch], lambda model, batch: loss_fn(model, batch).detach())
