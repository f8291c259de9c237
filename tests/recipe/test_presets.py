"""Each preset pairs, and asks for what the factory of the same meaning makes (spec: factories and zoo)."""

import re

import pytest

import crossgrain as cg
from crossgrain.hybrid import HybridQuantizer
from crossgrain.recipe import DelayedScalingRequest
from crossgrain.recipe.gemm_recipe import GemmRecipe
from crossgrain.recipe.pairing import check_pairs
from crossgrain.recipe.presets import PRESETS, preset_table
from crossgrain.recipe.roles import QuantizerRole

E4M3, E5M2 = cg.DType.kFloat8E4M3, cg.DType.kFloat8E5M2


def hp() -> cg.Quantizer:
    return cg.IdentityQuantizer()


def fp8(dtype: cg.DType = E4M3) -> cg.Quantizer:
    return cg.Float8CurrentScalingQuantizer(dtype)


def block(dim: int) -> cg.Quantizer:
    return cg.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


def mxfp8() -> cg.Quantizer:
    return cg.MXFP8Quantizer(E4M3)


def plain(row_scaled: bool = False) -> cg.Quantizer:
    return cg.NVFP4Quantizer(row_scaled_nvfp4=row_scaled)


def rotated(sr: bool = False) -> cg.Quantizer:
    return cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=sr)


def tiled() -> cg.Quantizer:
    return cg.NVFP4Quantizer(with_2d_quantization=True)


def hybrid(row: cg.Quantizer, column: cg.Quantizer, source: str = "rowwise_dequantized") -> cg.Quantizer:
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source)  # type: ignore[arg-type]


# The factory of the same meaning, and what it makes of input, weight and grad_output.
FACTORIES = {
    "hp": ("high_precision", (hp(), hp(), hp())),
    "fp8": ("current_scaling", (fp8(), fp8(), fp8(E5M2))),
    "fp8-block": ("float8_block_scaling", (block(1), block(2), block(1))),
    "mxfp8": ("mxfp8", (mxfp8(), mxfp8(), mxfp8())),
    "nvfp4": ("nvfp4", (rotated(), tiled(), rotated(sr=True))),
    "nvfp4-1d-weight": ("nvfp4_1d_weight", (rotated(), hybrid(plain(), plain()), rotated(sr=True))),
    "hp-fwd-mxfp8-bwd": (
        "high_precision_fwd_mxfp8_bwd",
        (hybrid(hp(), mxfp8(), "original"), hybrid(hp(), mxfp8(), "original"), mxfp8()),
    ),
    "mxfp8-fwd-nvfp4-bwd": (
        "mxfp8_fwd_nvfp4_bwd",
        (hybrid(mxfp8(), rotated(), "original"), hybrid(mxfp8(), plain()), rotated(sr=True)),
    ),
    "mxfp8-fwd-hp-bwd": (
        "mxfp8_fwd_high_precision_bwd",
        (hybrid(mxfp8(), hp()), hybrid(mxfp8(), hp()), hp()),
    ),
    "nvfp4-fwd-mxfp8-bwd": (
        "nvfp4_row_scaled_fwd_mxfp8_bwd",
        (hybrid(plain(row_scaled=True), mxfp8()), hybrid(plain(), mxfp8()), mxfp8()),
    ),
    "nvfp4-fwd-hp-bwd": (
        "nvfp4_row_scaled_fwd_high_precision_bwd",
        (hybrid(plain(row_scaled=True), hp()), hybrid(plain(), hp()), hp()),
    ),
    "nvfp4-fp8-attention": ("nvfp4_linear_fp8_dpa", (rotated(), tiled(), rotated(sr=True))),
}


def made(preset: str) -> dict:
    recipe = GemmRecipe.load(preset)
    tensors = ("input", "weight", "grad_output")
    return {tensor: recipe.qfactory(QuantizerRole("linear", tensor, "fc")) for tensor in tensors}


def same(a: cg.Quantizer, b: cg.Quantizer) -> bool:
    """Also of the options that reading a tensor does not show."""
    if not isinstance(a, HybridQuantizer) or not isinstance(b, HybridQuantizer):
        return type(a) is type(b) and a == b
    children = ((a.rowwise_quantizer, b.rowwise_quantizer), (a.columnwise_quantizer, b.columnwise_quantizer))
    return a.columnwise_source == b.columnwise_source and all(same(x, y) for x, y in children)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_compile_and_pair(name: str) -> None:
    check_pairs(made(name))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_recipes_that_can_be_written_down(name: str) -> None:
    recipe = GemmRecipe.load(name)
    assert GemmRecipe.load(str(recipe)) == GemmRecipe.load(PRESETS[name].line) == recipe
    assert not recipe.allow_mixed and PRESETS[name].description


@pytest.mark.parametrize("name", FACTORIES)
def test_presets_ask_for_what_their_factories_make(name: str) -> None:
    _, expected = FACTORIES[name]
    for quantizer, wanted in zip(made(name).values(), expected, strict=True):
        assert same(quantizer, wanted)


def test_attention_in_fp8_keeps_a_history_of_one_for_the_scores() -> None:
    recipe = GemmRecipe.load("nvfp4-fp8-attention")
    request = DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    expected = {"qkv": fp8(), "s": request, "do": fp8(E5M2), "dp": request}
    assert {tensor: recipe.qfactory(QuantizerRole("dpa", tensor, "core")) for tensor in expected} == expected


def test_the_table_has_every_preset_within_a_screen() -> None:
    table = preset_table()
    assert all(re.search(rf"^{name} +\w", table, re.MULTILINE) for name in PRESETS)
