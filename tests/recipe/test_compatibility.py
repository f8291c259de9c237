"""Which recipe may use a weight that was quantized at construction."""

import pytest
import torch

import crossgrain as cg
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    check_weight_matches_recipe,
)

from ..common.quantizers import QUANTIZERS

EXPECTED = {
    cg.Float8Quantizer: DelayedScaling,
    cg.Float8CurrentScalingQuantizer: Float8CurrentScaling,
    cg.MXFP8Quantizer: MXFP8BlockScaling,
    cg.Float8BlockQuantizer: Float8BlockScaling,
    cg.NVFP4Quantizer: NVFP4BlockScaling,
}
BUILT_IN = [DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling(), Float8BlockScaling(), NVFP4BlockScaling()]


@pytest.mark.parametrize("make", QUANTIZERS.values(), ids=QUANTIZERS)
def test_each_quantizer_names_its_recipe(make):
    quantizer = make()
    expected = EXPECTED.get(type(quantizer), CustomRecipe)
    assert quantizer._get_compatible_recipe() is expected
    for recipe in BUILT_IN:
        if type(recipe) is expected:
            check_weight_matches_recipe(quantizer, recipe, "fc1.weight")
        else:
            made_by, used_with = type(quantizer).__name__, type(recipe).__name__
            match = f"Recipe mismatch for fc1.weight: it was quantized by {made_by}.*cannot be used with {used_with}"
            with pytest.raises(RuntimeError, match=match):
                check_weight_matches_recipe(quantizer, recipe, "fc1.weight")


def test_hybrids_and_unknown_quantizers_come_from_factories():
    class Mine(cg.Quantizer):
        pass

    class MyMXFP8(cg.MXFP8Quantizer):
        pass

    e4m3 = cg.DType.kFloat8E4M3
    hybrid = cg.HybridQuantizer(rowwise_quantizer=cg.MXFP8Quantizer(e4m3), columnwise_quantizer=cg.NVFP4Quantizer())
    assert hybrid._get_compatible_recipe() is CustomRecipe
    assert Mine(rowwise=True, columnwise=True)._get_compatible_recipe() is CustomRecipe
    assert MyMXFP8(e4m3)._get_compatible_recipe() is MXFP8BlockScaling
    with pytest.raises(RuntimeError, match="HybridQuantizer"):
        check_weight_matches_recipe(hybrid, MXFP8BlockScaling(), "weight")


def test_recipes_with_a_factory_take_any_weight():
    class Mine(Recipe):
        _kind = "custom"

    for recipe in (CustomRecipe(lambda role: None), Mine()):
        for make in QUANTIZERS.values():
            check_weight_matches_recipe(make(), recipe, "weight")


def test_derived_recipes_and_plain_weights():
    class Mine(MXFP8BlockScaling):
        pass

    check_weight_matches_recipe(cg.MXFP8Quantizer(cg.DType.kFloat8E4M3), Mine(), "weight")
    check_weight_matches_recipe(None, Mine(), "weight")


def test_a_module_warns_when_the_class_of_its_recipe_changes(recwarn):
    layer, x = cg.Linear(32, 32, name="fc1"), torch.randn(32, 32)
    for recipe in (MXFP8BlockScaling(), MXFP8BlockScaling(margin=1)):
        with cg.autocast(recipe=recipe):
            layer(x)
    assert not recwarn.list
    for _ in range(2):
        with cg.autocast(recipe=DelayedScaling()):
            layer(x)
    for recipe in ("mxfp8", "nvfp4-plain"):
        with cg.autocast(recipe=recipe):
            layer(x)
    (warning,) = recwarn.list
    assert "fc1: Recipe type changed from MXFP8BlockScaling to DelayedScaling" in str(warning.message)
    assert warning.filename == __file__, "it names the line of the caller"
