"""Recipes as text: exact, independent of the environment, and never a way to run code."""

import functools
import json
import sys

import pytest
import torch

from crossgrain import recipe as recipes
from crossgrain.recipe import GemmRecipe, factories, zoo
from crossgrain.recipe.params import QParams
from crossgrain.recipe.portable import recipe_from_text, recipe_to_text


def my_factory(role):
    return factories.mxfp8_factory(role)


def my_algorithm(history):
    return history.amax(0)


RECIPES = [
    GemmRecipe.load("nvfp4; first 2 blocks: mxfp8; *.lm_head: hp"),
    GemmRecipe.load("mxfp8-fwd-nvfp4-bwd"),
    recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    recipes.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="weights"),
    recipes.DelayedScaling(amax_history_len=7, margin=1),
    recipes.Float8CurrentScaling(use_power_2_scales=True),
    recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    recipes.CustomRecipe(qfactory=zoo.mxfp8_fwd_nvfp4_bwd_factory, quantization_alignment=64),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_text_holds_exactly_the_recipe(recipe, monkeypatch):
    text = recipe_to_text(recipe)
    assert "\n" not in text
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    again = recipe_from_text(text)
    assert type(again) is type(recipe)
    assert again.options() == recipe.options()


def test_parameters_that_were_set_on_a_recipe_travel():
    for recipe in (recipes.NVFP4BlockScaling(), recipes.Float8CurrentScaling()):
        name = "fp4_quant_fwd_inp" if recipe.nvfp4() else "fp8_quant_fwd_inp"
        setattr(recipe, name, QParams(amax_epsilon=0.5))
        assert getattr(recipe_from_text(recipe_to_text(recipe)), name) == QParams(amax_epsilon=0.5)


def test_functions_at_module_scope_travel_by_name_and_are_imported_on_request():
    for recipe in (
        recipes.CustomRecipe(qfactory=my_factory),
        recipes.DelayedScaling(amax_compute_algo=my_algorithm),
    ):
        text = recipe_to_text(recipe)
        assert f"{__name__}:my_" in text
        with pytest.raises(ValueError, match="import_functions=True if you trust"):
            recipe_from_text(text)
        assert recipe_from_text(text, import_functions=True).options() == recipe.options()


class Factory:
    def __call__(self, role):
        return my_factory(role)

    def method(self, role):
        return my_factory(role)


@pytest.mark.parametrize(
    "function",
    [lambda role: None, functools.partial(my_factory), Factory(), Factory().method],
    ids=["lambda", "partial", "object", "method"],
)
def test_other_functions_are_refused_by_name_of_the_option(function):
    with pytest.raises(ValueError, match="CustomRecipe: qfactory is .* at module scope"):
        recipe_to_text(recipes.CustomRecipe(qfactory=function))


def test_recipe_classes_of_others_are_refused():
    class Mine(recipes.MXFP8BlockScaling):
        pass

    with pytest.raises(ValueError, match="Mine is not one of crossgrain's"):
        recipe_to_text(Mine())


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"recipe": "Linear"}',
        '{"recipe": ["MXFP8BlockScaling"]}',
        '{"recipe": "MXFP8BlockScaling", "surprise": 1}',
        '{"recipe": "MXFP8BlockScaling", "fp8_format": {"Format": "E9M9"}}',
        '{"recipe": "MXFP8BlockScaling", "fp8_format": {"code": "1"}}',
        '{"recipe": "CustomRecipe", "qfactory": {"function": "os:system"}}',
        '{"recipe": "CustomRecipe", "qfactory": {"function": ["os"]}}',
        '{"recipe": "Float8CurrentScaling", "fp8_gemm_fprop": {"MMParams": {"hook": 1}}}',
    ],
)
def test_tampered_text_is_refused(text):
    with pytest.raises(ValueError, match=".") as caught:
        recipe_from_text(text)
    assert not isinstance(caught.value, json.JSONDecodeError)


def test_nothing_is_imported_without_a_request(tmp_path, monkeypatch):
    (tmp_path / "surprise_module.py").write_text("raise SystemExit('code ran')")
    monkeypatch.syspath_prepend(tmp_path)
    text = json.dumps({"recipe": "CustomRecipe", "qfactory": {"function": "surprise_module:f"}})
    with pytest.raises(ValueError, match="surprise_module:f"):
        recipe_from_text(text)
    assert "surprise_module" not in sys.modules


@pytest.mark.parametrize("path", ["no_such_module:f", f"{__name__}:nobody", f"{__name__}:RECIPES"])
def test_functions_that_are_not_there_are_named(path):
    text = json.dumps({"recipe": "CustomRecipe", "qfactory": {"function": path}})
    with pytest.raises(ValueError, match=path):
        recipe_from_text(text, import_functions=True)


def test_a_recipe_runs_as_its_text_does():
    import crossgrain as cg

    recipe = recipes.CustomRecipe(qfactory=zoo.mxfp8_fwd_nvfp4_bwd_factory)
    layer, x = cg.Linear(32, 32), torch.randn(32, 32)
    with cg.autocast(recipe=recipe):
        expected = layer(x)
    with cg.autocast(recipe=recipe_from_text(recipe_to_text(recipe))):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    "option, value",
    [
        ("fp8_format", [{"Format": "HYBRID"}]),
        ("fp8_format", 3),
        ("backward_override", [None]),
        ("amax_history_len", {"Format": "E4M3"}),
        ("amax_history_len", 0),
        ("amax_compute_algo", "least"),
        ("fp8_dpa", 1),
    ],
)
def test_values_of_wrong_types_are_refused(option, value):
    content = {**json.loads(recipe_to_text(recipes.DelayedScaling())), option: value}
    with pytest.raises(ValueError, match=option):
        recipe_from_text(json.dumps(content))
