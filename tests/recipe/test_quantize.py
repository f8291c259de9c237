"""`quantize` reads formats as recipes do."""

import pytest
import torch

import crossgrain as cg
from crossgrain.recipe.format_spec import FormatSpec
from crossgrain.recipe.syntax import RecipeSyntaxError

from ..common.quantizers import assert_same_bytes


def test_formats_are_written_as_in_recipes():
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    plain = cg.NVFP4Quantizer(with_2d_quantization=True)(x)
    for text in ("nvfp4(2d)", "NVFP4(2D)", "nvfp4_2d", FormatSpec("nvfp4", two_d=True), cg.get_format("nvfp4_2d")):
        assert_same_bytes(cg.quantize(x, text), plain)
    assert_same_bytes(cg.quantize(x, "MXFP8"), cg.quantize(x, "mxfp8"))
    rotated = cg.quantizer_for("nvfp4(rht, sr)", rowwise=False)
    assert rotated.with_rht and rotated.stochastic_rounding
    assert rotated.get_usages() == {"rowwise": False, "columnwise": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mxpf8", "there is no format 'mxpf8'; did you mean 'mxfp8'"),
        ("nvfp4(rth)", "no option 'rth'; did you mean 'rht'"),
        ("fp8(delayed)", "needs a history, which only a layer has"),
    ],
)
def test_mistakes_are_pointed_out(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        cg.quantize(torch.zeros(32, 32), text)
    assert isinstance(caught.value, RecipeSyntaxError) or "delayed" in text


def test_a_format_of_a_recipe_is_a_quantizer():
    quantizer = cg.recipe.quantizer_for("nvfp4(rht, sr)")
    assert quantizer is not cg.recipe.quantizer_for("nvfp4(rht, sr)")
    assert quantizer == cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"^fp8\(e5m2, delayed\): a quantizer with delayed scaling needs a history"):
        cg.recipe.quantizer_for("fp8(e5m2, delayed)")


def test_recipes_may_be_mappings_and_in_capitals():
    same = cg.recipe.as_recipe("mxfp8; head: hp")
    assert cg.recipe.as_recipe({"preset": "MXFP8", "rules": {"head": "HP"}}) == same
    assert cg.recipe.as_recipe("MXFP8; head: HP") == same
    with pytest.raises(TypeError, match="the path of a file or a mapping, got int: 3"):
        cg.recipe.as_recipe(3)
