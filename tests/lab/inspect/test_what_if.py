"""Formats that are not in use: as text, for each tensor and direction."""

import pytest

import crossgrain as cg
from crossgrain.lab.inspect.what_if import WhatIf
from crossgrain.planes import COLUMNWISE, ROWWISE


def test_a_format_is_for_all_operands_with_the_options_that_are_meant_for_them():
    what_if = WhatIf("nvfp4(2d, rht, sr)")
    weight = what_if.alternatives("fc", "weight", "linear")
    dy = what_if.alternatives("fc", "grad_output", "linear")
    assert weight[ROWWISE].encoding.format.block == (16, 16) and not weight[ROWWISE].encoding.stochastic
    assert dy[ROWWISE].encoding.stochastic and dy[ROWWISE].encoding.format.rotation is None
    assert dy[COLUMNWISE].encoding.format.rotation is not None


def test_a_name_that_is_a_format_and_a_preset_is_the_format():
    assert WhatIf("nvfp4").alternatives("fc", "weight", "linear")[ROWWISE].encoding.format.block == (1, 16)


def test_a_hybrid_has_the_formats_of_the_recipe_in_each_direction():
    what_if = WhatIf("fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr), weight.source: dequantized; head: hp")
    x = what_if.alternatives("fc", "input", "linear")
    assert x[ROWWISE].encoding.format.name == "mxfp8" and x[COLUMNWISE].encoding.format.rotation is not None
    weight = what_if.alternatives("fc", "weight", "linear")
    assert weight[COLUMNWISE].rows == weight[ROWWISE].encoding and weight[ROWWISE].rows is None
    assert what_if.alternatives("head", "input", "linear")[ROWWISE].encoding.format.is_identity
    assert WhatIf("mxfp8-fwd-nvfp4-bwd").alternatives("fc", "input", "linear") == x


def test_tensors_of_attention_have_no_alternative():
    assert WhatIf("mxfp8").alternatives("core", "qkv", "dpa") is None


def test_histories_are_refused():
    with pytest.raises(
        ValueError, match="what_if 'fp8-delayed': delayed scaling takes its scales from the steps before"
    ):
        WhatIf("fp8-delayed")


def test_mistakes_are_shown():
    with pytest.raises(cg.recipe.RecipeSyntaxError, match="nvfp5"):
        WhatIf("nvfp5")
