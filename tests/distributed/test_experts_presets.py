"""A mixture of experts over two ranks with every preset: what is the same as in one process, and what is refused."""

import pytest

import crossgrain as cg
from crossgrain.recipe.presets import PRESETS

from ..common.ranks import run
from .test_experts_moe import MOE, first_step, same_gradients

FROM_ROWS = ", input.source: dequantized"
HYBRIDS = (
    "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr), input.source: dequantized, weight.source: dequantized",
    "fprop: mxfp6_e2m3, dgrad: fp8, wgrad: fp8_block",
)
# Tokens are sent quantized as they are, with one scale for all of them; or they are not quantized.
SENT = {"fp8": "one scale", "hp": None, "hp-fwd-mxfp8-bwd": None, HYBRIDS[0]: "rows"}
SENT |= dict.fromkeys(("nvfp4-fwd-mxfp8-bwd", "nvfp4-fwd-hp-bwd", "mxfp8-fwd-hp-bwd", "mxfp4-qat"), "rows")
SENT |= {"nvfp4-qat": "one scale", "mxfp4-qat-weights": None, "nvfp4-qat-weights": None}
# Tokens are sent quantized if columns may be made from rows. Otherwise this is refused.
SENT_FROM_ROWS = dict.fromkeys(("fp8-block", "mxfp8", "mxfp8-2d", "mxfp4", "mxfp8-fwd-nvfp4-bwd"), "rows")
SENT_FROM_ROWS |= dict.fromkeys(("nvfp4", "nvfp4-plain", "nvfp4-1d-weight", "nvfp4-fp8-attention"), "one scale")
SENT_FROM_ROWS |= {HYBRIDS[1]: "rows"}
REFUSED = {"fp8-delayed": "fp8 scale is set from outside, as by delayed scaling, .*; use current scaling"}
AT_RANDOM = ("mxfp4", "nvfp4", "nvfp4-1d-weight", "mxfp8-fwd-nvfp4-bwd", "nvfp4-fp8-attention", HYBRIDS[0])


def quantized_recipes():
    return {**SENT, **{name + FROM_ROWS: how for name, how in SENT_FROM_ROWS.items()}}


def steps():
    plain = {name: first_step(name) for name in (*PRESETS, *HYBRIDS)}
    return plain, {name: first_step(name, sends_quantized=True) for name in quantized_recipes()}


def _steps(rank):
    return *steps(), {name: first_step(name) for name in quantized_recipes()}


def assert_one_process(name, of_ranks, alone):
    (out0, gradients0, _), (out1, gradients1, _) = of_ranks
    out, gradients, counts = alone
    assert out0 + out1 == out, name
    assert counts[1] == 0, "an expert without tokens"
    if name.removesuffix(FROM_ROWS) not in AT_RANDOM:  # each rank draws numbers only for its own experts
        assert same_gradients(gradients0 | gradients1, dict(gradients)), name


def test_two_ranks_are_one_process_with_every_preset(tmp_path):
    assert {*SENT, *SENT_FROM_ROWS, *REFUSED} == {*PRESETS, *HYBRIDS}, "a preset was added"
    plain, quantized = steps()
    ranks = run(_steps, 2, tmp_path)
    for at, alone in enumerate((plain, quantized)):
        for name, result in alone.items():
            assert_one_process(name, [of_rank[at][name] for of_rank in ranks], result)
    for name, how in quantized_recipes().items():
        for _, sent, on_arrival in ranks:  # also with stochastic rounding, whose numbers are those of the rank
            assert (sent[name] == on_arrival[name]) == (how != "one scale"), name


@pytest.mark.parametrize("name", [*SENT_FROM_ROWS, *REFUSED])
def test_what_cannot_be_sent_is_refused_with_layer_and_remedy(name):
    layer = cg.GroupedLinear(2, 64, 64, name="experts.up")
    reason = REFUSED.get(name, "its columnwise plane is made from the input in high precision; use 'input.source: dequ")
    text = f"experts.up: the input cannot be sent to this layer as rowwise planes: .*{reason}.*Or dispatch the tokens"
    with cg.autocast(recipe=cg.recipe.as_recipe(name)), pytest.raises(ValueError, match=text):
        layer.token_quantizer()


@pytest.mark.parametrize("name", [*SENT_FROM_ROWS, *SENT])
def test_without_training_rows_are_enough(name):
    layer = cg.GroupedLinear(2, 64, 64).requires_grad_(False)
    with cg.autocast(recipe=cg.recipe.as_recipe(name)):
        assert (layer.token_quantizer() is None) == (SENT.get(name, "rows") is None)


def _delayed(rank):
    return {reduce: MOE["train"](3, f"all: fp8(delayed(reduce={reduce}))", 4)[0] for reduce in ("true", "false")}


def test_experts_have_histories_of_their_own_if_ranks_do_not_share_them(tmp_path):
    """With shared histories, the first expert of a rank has the scales of the first experts of all ranks."""
    alone = _delayed(0)["false"]
    for found in run(_delayed, 2, tmp_path):
        assert found["false"] == pytest.approx(alone, rel=1e-6)  # the router's gradient is added up rank by rank
        assert abs(found["true"][1] - alone[1]) > 1e-6 * alone[1]


def test_a_quantizer_of_tokens_that_rounds_at_random_is_refused():
    def at_random(role):
        return cg.NVFP4Quantizer(stochastic_rounding=True)

    layer = cg.GroupedLinear(2, 64, 64, name="up")
    with (
        cg.autocast(recipe=cg.recipe.CustomRecipe(qfactory=at_random)),
        pytest.raises(
            ValueError, match="up: .*stochastic rounding depends on the position .*; round the input to nearest"
        ),
    ):
        layer.token_quantizer()
