"""An autocast that has no effect says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.recipe import unused

from ..common.logs import logged, silent, warned


@pytest.fixture(autouse=True)
def nothing_compared_yet():
    unused._ran_with.clear()
    unused._warned.clear()


def ran(model, recipe, x=None, **options):
    with logged() as records, cg.autocast(recipe=recipe, **options):
        model(torch.randn(32, 64) if x is None else x)
    return [record.getMessage() for record in records]


@pytest.mark.parametrize("recipe", ["mxfp8", cg.recipe.DelayedScaling(), cg.recipe.MXFP8BlockScaling()])
def test_a_model_without_layers_of_crossgrain_is_said(recipe):
    (message,) = ran(nn.Linear(64, 64), recipe)
    assert "no layer of crossgrain ran inside this autocast" in message and "crossgrain.convert" in message
    assert ran(nn.Sequential(nn.Linear(64, 64), cg.Linear(64, 64)), recipe) == []
    assert ran(nn.Linear(64, 64), recipe, enabled=False) == []


def test_the_warning_is_about_the_callers_line():
    with warned("no layer of crossgrain") as caught, cg.autocast(recipe="mxfp8"):
        pass
    assert caught[0].pathname == __file__
    assert f"({Path(__file__).name}, line {caught[0].lineno})" in caught[0].getMessage()


def test_an_error_inside_is_enough():
    with silent(), pytest.raises(ZeroDivisionError), cg.autocast(recipe="mxfp8"):
        raise ZeroDivisionError


def test_compiled_and_fusible_layers_count():
    model = cg.ops.Sequential(cg.ops.Linear(64, 64))
    assert ran(model, "mxfp8") == []
    assert ran(torch.compile(cg.Linear(64, 64), backend="eager"), "mxfp8") == []


def named():
    model = nn.Sequential(cg.Linear(64, 64), cg.LayerNormMLP(64, 64))
    cg.name_layers(model)
    return model


def test_a_rule_that_matches_no_layer_is_said_once():
    model = named()
    (message,) = ran(model, "all: mxfp8; 0: nvfp4; lm_hed: hp; 7|1.fc2: hp")
    assert "rule 2 (lm_hed), rule 3 (7|1.fc2)" in message and "0, 1.fc1, 1.fc2" in message
    assert ran(model, "all: mxfp8; 0: nvfp4; lm_hed: hp; 7|1.fc2: hp") == []


def test_a_second_model_is_compared_too():
    recipe = "all: mxfp8; 0: nvfp4; head: hp"
    assert len(ran(named(), recipe)) == 1
    assert ran(named(), recipe) == []  # said before
    recipe = "all: mxfp8; 0: nvfp4"
    assert ran(named(), recipe) == []
    other = nn.Sequential(cg.Linear(64, 64, name="only"))
    assert ran(other, recipe) == []  # the rule has matched a layer of another model
    recipe = "all: nvfp4; 0: mxfp8"
    assert len(ran(other, recipe)) == 1


def test_parts_of_a_model_that_run_in_autocasts_of_their_own():
    model, line = named(), "all: mxfp8; 0: nvfp4; 1.fc2: hp"
    (message,) = ran(model[0], line)
    assert "rule 2 (1.fc2)" in message and "recipe.for_model(model)" in message
    assert ran(model[1], line) == []
    checked = cg.recipe.GemmRecipe.load(line).for_model(model)
    assert ran(model[0], checked) == ran(model[1], checked) == []


def test_layers_that_an_inner_autocast_switches_off_have_run():
    class Inner(nn.Linear):
        def forward(self, x):
            with cg.autocast(enabled=False):
                return layer(x)

    layer = cg.Linear(64, 64)
    assert ran(Inner(64, 64), "mxfp8") == []


def test_weights_that_are_kept_quantized_are_compared_too():
    recipe = "all: mxfp8; head: hp"
    with cg.quantized_model_init(recipe=recipe):
        model = named()
    (message,) = ran(model, recipe)
    assert "rule 1 (head)" in message


def test_rules_that_match_are_silent():
    model = named()
    for rules in ("0: nvfp4", "1.*: hp", "type=linear: nvfp4", "0|1.fc1: hp"):
        assert ran(model, f"all: mxfp8; {rules}") == []
