"""After the warm-up for a recipe, training with it compiles nothing."""

import pytest
import torch

import crossgrain as cg
from crossgrain.kernels.cpu import decoders, runtime
from crossgrain.nn.warm_recipe import warm_up_for

RULES = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr); *.down: fp8; last 10 % of steps: hp"


@pytest.fixture
def compiled(monkeypatch):
    """What is compiled, as in a process that has compiled nothing."""
    known = {name: getattr(runtime, name) for name in ("_compiled", "_addresses")}
    for name in known:
        monkeypatch.setattr(runtime, name, {})
    monkeypatch.setattr(decoders, "_decoders", {})  # they keep kernels for shapes that other tests have used
    yield runtime._compiled
    for name, before in known.items():  # plans hold addresses, by which the guard of memory finds kernels
        before.update(getattr(runtime, name))


@pytest.mark.parametrize("text", ["mxfp8-fwd-nvfp4-bwd", RULES])
def test_training_compiles_nothing_afterwards(text, compiled):
    recipe = cg.recipe.RecipeSchedule.load(text)
    random = torch.get_rng_state()
    steps = list(warm_up_for(recipe))
    assert [step.number for step in steps] == list(range(steps[0].total)) and compiled
    assert torch.equal(torch.get_rng_state(), random)
    before = set(compiled)
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.ModuleDict(
            {name: torch.nn.Linear(64, 96, dtype=dtype) if name == "up" else torch.nn.Linear(96, 64, dtype=dtype)
             for name in ("up", "down")}
        )  # fmt: skip
        cg.convert(model, recipe=recipe.recipe_at(0, total_steps=100))
        model["down"](model["up"](torch.randn(32, 64, dtype=dtype, requires_grad=True))).sum().backward()
        large = cg.Linear(1024, 1024, params_dtype=dtype)
        experts = cg.GroupedLinear(3, 64, 96, params_dtype=dtype)
        with cg.autocast(recipe=recipe.recipe_at(0, total_steps=100)):
            large(torch.randn(1024, 1024, dtype=dtype, requires_grad=True)).sum().backward()
            experts(torch.randn(96, 64, dtype=dtype, requires_grad=True), [32, 0, 64]).sum().backward()
    assert [(key[0].__name__, *key[1:]) for key in compiled if key not in before] == []


def test_every_rule_and_phase_is_tried():
    names = [step.name for step in warm_up_for(cg.recipe.RecipeSchedule.load(RULES))]
    assert [name.rpartition(",")[0] for name in names[::2]] == ["all layers", "*.down", "last 10 % of steps"]


def test_recipes_of_transformer_engine(compiled):
    steps = list(warm_up_for(cg.recipe.MXFP8BlockScaling()))
    assert [step.name for step in steps] == ["all layers, float32", "all layers, bfloat16"] and compiled
