"""Options in the text of a recipe follow from what is registered, also for formats that are registered later."""

import pytest

import crossgrain as cg
from crossgrain.formats import E2M1, E4M3, E5M2, Format, ScaleLayout, registry
from crossgrain.recipe import GemmRecipe
from crossgrain.recipe.format_spec import FormatSpec, aliases, format_names, options_of
from crossgrain.recipe.syntax import RecipeSyntaxError

TILE = ScaleLayout(pad=(128, 4))
REPLICATED = ScaleLayout(pad=(128, 4), replicated=True)

AS_BEFORE = {
    "hp": ("bf16", "fp16", "fp32"),
    "fp8": ("e4m3", "e5m2", "pow2", "eps", "delayed"),
    "fp8_block": ("e4m3", "e5m2", "2d", "f32_scales", "eps"),
    "mxfp8": ("e4m3", "e5m2", "2d"),
    "nvfp4": ("2d", "row_scaled", "rht", "sr", "4over6"),
    "nvfp4_2d_max256": ("sr",),
    "mxfp4": ("sr",),
    "mxfp6_e2m3": ("sr",),
    "mxfp6_e3m2": ("sr",),
    "mxint8": ("sr",),
    "hifloat8": ("sr",),
    "nvfp4_ue5m3": ("sr",),
}


@pytest.fixture(autouse=True)
def _scratch_registry(monkeypatch):
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))


def test_the_options_of_the_built_in_formats():
    assert {name: options_of(name) for name in format_names()} == AS_BEFORE


def test_tiles_that_are_registered_are_an_option():
    with pytest.raises(RecipeSyntaxError, match="mxfp4 has no option '2d'; available: sr"):
        FormatSpec.parse("mxfp4(2d)")
    tiled = cg.register_format(Format("mxfp4_2d", E2M1, (32, 32), "e8m0_floor", REPLICATED))
    spec = FormatSpec.parse("mxfp4(2d, sr)")
    assert str(spec) == "mxfp4(2d, sr)" and FormatSpec.parse("mxfp4_2d(sr)") == spec
    assert spec.quantizer() == cg.FormatQuantizer(tiled, stochastic_rounding=True)
    assert spec.stored_format(cg.COLUMNWISE) == tiled
    assert "mxfp4_2d" in aliases() and "mxfp4_2d" not in format_names()
    plan = GemmRecipe.load("all: mxfp4(2d, sr)").layer_formats("layer", "linear")
    assert str(plan.format("fprop", "weight").value) == "mxfp4(2d)"  # tiles are for weights
    assert str(plan.format("dgrad", "grad_output").value) == "mxfp4(sr)"


def test_elements_and_amaxes_per_row_are_options_too():
    for element, suffix in ((E4M3, ""), (E5M2, "_e5m2")):
        for block, tiles in (((1, 64), ""), ((64, 64), "_2d")):
            layout = REPLICATED if tiles else TILE
            cg.register_format(Format(f"wide{tiles}{suffix}", element, block, "e8m0_up", layout, transposes=False))
    assert options_of("wide") == ("e4m3", "e5m2", "2d", "sr")
    assert FormatSpec.parse("wide(2d, e5m2)").stored_format(cg.ROWWISE).name == "wide_2d_e5m2"
    for amax in ("tensor", "row"):
        name = "two" + "_row_scaled" * (amax == "row")
        cg.register_format(Format(name, E2M1, (1, 32), "two_level", TILE, global_amax=amax))
    assert options_of("two") == ("row_scaled", "sr")


def test_a_name_alone_makes_no_variant():
    """``mine_2d`` has another element, so it is a format of its own."""
    cg.register_format(Format("mine", E2M1, (1, 64), "e8m0_up", TILE))
    cg.register_format(Format("mine_2d", E4M3, (64, 64), "e8m0_up", REPLICATED))
    assert options_of("mine") == ("sr",) == options_of("mine_2d")
    assert str(FormatSpec.parse("mine_2d(sr)")) == "mine_2d(sr)"


def test_options_that_are_registered_apart_but_not_together():
    base = {"block": (1, 64), "scale_rule": "e8m0_up", "layout": TILE, "transposes": False}
    cg.register_format(Format("part", E4M3, **base))
    cg.register_format(Format("part_e5m2", E5M2, **base))
    cg.register_format(Format("part_2d", E4M3, **{**base, "block": (64, 64), "layout": REPLICATED}))
    with pytest.raises(ValueError, match=r"part\(e5m2, 2d\): no format is registered for these options together"):
        FormatSpec.parse("part(2d, e5m2)").quantizer()
