"""A dry run with fake tensors, as estimators of memory do it: shapes without numbers, and nothing of it stays."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import crossgrain as cg
from crossgrain.kernels.workspaces import free_workspaces

RECIPES = {
    "fp8": "fp8",
    "fp8_delayed": cg.recipe.DelayedScaling(),
    "fp8_block": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "hybrid": "mxfp8-fwd-nvfp4-bwd",
}


def model(recipe):
    made = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
    cg.convert(made, recipe)
    return made


def step(made):
    x = torch.randn(32, 64, requires_grad=True)
    y = made(x)
    y.sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in made.parameters())]


def step_of_numbers(recipe):
    torch.manual_seed(0)
    return step(model(recipe))


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_has_the_shapes_and_leaves_nothing(name):
    expected = step_of_numbers(RECIPES[name])
    free_workspaces()
    with FakeTensorMode():
        shapes = [result.shape for result in step(model(RECIPES[name]))]
    assert shapes == [result.shape for result in expected]
    for found, known in zip(step_of_numbers(RECIPES[name]), expected, strict=True):
        assert torch.equal(found, known)


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_draws_no_numbers(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with FakeTensorMode():
        step(model(RECIPES[name]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dry_run_may_be_the_first_thing_in_a_process():
    """What is imported in it makes no tensors that are kept."""
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tests.linear.test_dry_run import model, step
with FakeTensorMode():
    step(model("fp8"))
assert all(result.isfinite().all() for result in step(model("fp8")))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
