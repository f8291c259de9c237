"""Recipes in one line."""

import pytest
from hypothesis import given, settings

from crossgrain.recipe.gemm_recipe import GemmRecipe
from crossgrain.recipe.syntax import RecipeSyntaxError

from ..common.recipes import recipes


@given(recipes())
@settings(deadline=None)
def test_a_recipe_is_its_line(recipe: GemmRecipe) -> None:
    assert GemmRecipe.load(str(recipe)) == recipe
    assert str(GemmRecipe.load(str(recipe))) == str(recipe)
    assert eval(repr(recipe)) == recipe


@pytest.mark.parametrize(
    "line, canonical",
    [
        ("all: mxfp8", "fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8"),
        ("nvfp4(2d, rht, sr)", "fprop: nvfp4(2d), dgrad: nvfp4(2d, sr), wgrad: nvfp4(rht, sr)"),
        ("fp8_e5m2, fprop: mxfp8", "fprop: mxfp8, dgrad: fp8(e5m2), wgrad: fp8(e5m2)"),
        ("wgrad:hp ,fprop :mxfp8,dgrad: hp", "fprop: mxfp8, dgrad: hp, wgrad: hp"),
        ("mxfp8, weight.source: original", "fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8"),
        ("mxfp8, allow_mixed: false, attention: hp", "fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8"),
        ("hp, allow_mixed: true", "fprop: hp, dgrad: hp, wgrad: hp, allow_mixed: true"),
        (
            "hp;\n  *.q | *.k: fprop: mxfp8 ;first 1 blocks:all: mxfp8, weight.source: original",
            "fprop: hp, dgrad: hp, wgrad: hp; *.q|*.k: fprop: mxfp8; first 1 block: mxfp8, weight.source: original",
        ),
        (
            "hp, blocks: model.layers, backward_override: dequantized; type = linear: mxfp8",
            "fprop: hp, dgrad: hp, wgrad: hp, backward_override: dequantized, blocks: model.layers; type=linear: mxfp8",
        ),
    ],
)
def test_lines_have_a_canonical_form(line: str, canonical: str) -> None:
    assert str(GemmRecipe.load(line)) == canonical


def test_a_line_may_begin_with_a_preset() -> None:
    full = GemmRecipe.load("nvfp4; *.head: hp")
    assert full == GemmRecipe.load("nvfp4(2d, rht, sr); *.head: hp")
    assert GemmRecipe.load("nvfp4, fprop: mxfp8").dgrad == full.dgrad


def test_a_setting_on_top_of_a_preset_replaces_its_operands_too() -> None:
    recipe = GemmRecipe.load("nvfp4-fp8-attention, attention: hp")
    assert recipe == GemmRecipe.load("nvfp4")


@pytest.mark.parametrize(
    "line, message, marked",
    [
        ("fprop: mxfp8, drgad: nvfp4", "no setting 'drgad'; did you mean 'dgrad'?", "drgad"),
        ("fprop: mxfp8, dgrad: nvpf4", "no format 'nvpf4'; did you mean 'nvfp4'?", "nvpf4"),
        ("fprop: mxfp8, dgrad: nvfp4(rht, srr)", "nvfp4 has no option 'srr'; did you mean 'sr'?", "srr"),
        ("mxfp8-fwd-nvfp4-bw", "no preset or format", "mxfp8-fwd-nvfp4-bw"),
        ("fprop: mxfp8, nvfp4", "'nvfp4' needs a key, like 'fprop: nvfp4'", "nvfp4"),
        ("fprop: mxfp8, fprop: nvfp4", "fprop is set twice", "nvfp4"),
        ("fprop: , dgrad: hp", "fprop needs a value", "fprop:"),
        ("mxfp8,, dgrad: hp", "expected a setting", ","),
        ("", "expected a setting", ""),
        ("mxfp8, weight.source: deq", "weight.source must be original, dequantized or dequantized_late, got", "deq"),
        ("mxfp8, allow_mixed: maybe", "allow_mixed must be true or false", "maybe"),
        ("mxfp8, backward_override: hp", "backward_override must be high_precision or dequantized", "hp"),
        ("mxfp8; dgrad: nvfp4", "Separate settings by ','", "dgrad"),
        ("mxfp8; *.head", "a rule must be written as 'pattern: format'", "*.head"),
        ("mxfp8; *.head: hpp", "no format 'hpp'", "hpp"),
        ("mxfp8; *.head: fprop: hp, dgrda: hp", "did you mean 'dgrad'?", "dgrda"),
        ("mxfp8; *.head: fprop: hp, mxfp8", "'mxfp8' needs a key", "mxfp8"),
        ("mxfp8; *.head: allow_mixed: true", "allow_mixed is an option of the whole recipe", "true"),
        ("mxfp8; first two blocks: hp", "is not a pattern", "first two blocks"),
        ("mxfp8; first 0 blocks: hp", "the number of blocks must be at least 1", "first 0 blocks"),
        ("mxfp8; *.a||*.b: hp", "a pattern is missing", "*.a||*.b"),
        ("mxfp8; : hp", "a pattern is missing", ":"),
        (
            "fprop: nvfp4(sr), dgrad: hp, wgrad: hp",
            "sr is meant for the gradient operand, which fprop does not have",
            "nvfp4(sr)",
        ),
        ("fprop: fp8_e5m2, dgrad: hp, wgrad: hp", "e4m3/e5m2 is meant for the gradient operand", "fp8_e5m2"),
        ("wgrad: nvfp4(2d)", "2d is meant for the weight operand, which wgrad does not have", "nvfp4(2d)"),
        ("dgrad: nvfp4(row_scaled)", "row_scaled is meant for the input operand", "nvfp4(row_scaled)"),
        ("dgrad: nvfp4(rht)", "only columnwise data is rotated", "nvfp4(rht)"),
        (
            "mxfp8, fprop.weight: nvfp4(rht)",
            "fprop reads weight rowwise, but rht rotates only columnwise",
            "nvfp4(rht)",
        ),
        ("wgrad: nvfp4(rht, 4over6)", "cannot be combined", "nvfp4(rht, 4over6)"),
        ("fp8, fprop.input: fp8(e5m2, delayed)", "delayed scaling in E5M2 is for gradients", "fp8(e5m2, delayed)"),
        ("mxfp8, attention: nvfp4(2d)", "the weight operand, which attention does not have", "nvfp4(2d)"),
    ],
)
def test_an_error_points_into_the_line(line: str, message: str, marked: str) -> None:
    with pytest.raises(RecipeSyntaxError) as error:
        GemmRecipe.load(line)
    first, shown, carets = str(error.value).split("\n")
    assert message in first
    assert shown == f"  {line}"
    start = carets.index("^")
    assert shown[start : start + carets.count("^")] == marked


def test_every_gemm_has_to_be_said() -> None:
    with pytest.raises(ValueError, match="dgrad is not set; write 'dgrad: hp' to keep it"):
        GemmRecipe.load("fprop: mxfp8")


def test_all_on_top_of_a_preset_replaces_its_gemms_and_sources() -> None:
    for preset in ("nvfp4", "nvfp4-1d-weight", "nvfp4-fwd-mxfp8-bwd"):
        assert GemmRecipe.load(f"{preset}, all: mxfp8") == GemmRecipe.load("mxfp8")
        assert GemmRecipe.load({"preset": preset, "all": "mxfp8"}) == GemmRecipe.load("mxfp8")
        assert GemmRecipe.load(f"hp; x: {preset}, all: mxfp8") == GemmRecipe.load("hp; x: mxfp8")
    attention = GemmRecipe.load("nvfp4-fp8-attention, all: mxfp8")
    assert str(attention.fprop) == "mxfp8" and attention.fp8_dpa
