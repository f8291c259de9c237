"""Runs without numbers: with fake tensors, of which nothing may stay, and while `make_fx` records operations."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import crossgrain as cg
from crossgrain.kernels.workspaces import free_workspaces, workspace
from crossgrain.runtime.random_numbers import DrawRecord

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
    return step_of(made, torch.randn(32, 64))


def step_of(made, x):
    x = x.detach().requires_grad_()
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


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_of_a_model_that_has_numbers_leaves_them_alone(name):
    torch.manual_seed(0)
    used = model(RECIPES[name])
    with FakeTensorMode(allow_non_fake_inputs=True):
        step(used)
    used.zero_grad()
    found = step(used)
    for mine, known in zip(found, step_of_numbers(RECIPES[name]), strict=True):
        assert torch.equal(mine, known)


def test_a_dry_run_keeps_no_copy_of_a_weight():
    torch.manual_seed(0)
    layer, x = cg.Linear(64, 64), torch.randn(32, 64)
    with cg.autocast(recipe="mxfp8"):
        expected = layer(x)
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer(x, is_first_microbatch=True)
        cg.Linear(64, 64)(torch.randn(32, 64))  # no operand of before is left in a workspace
        assert torch.equal(layer(x, is_first_microbatch=False), expected)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_weights_that_are_kept_quantized(recipe):
    with cg.quantized_model_init(recipe=recipe):
        layer = cg.Linear(64, 64)
    x = torch.randn(32, 64)
    with cg.autocast(recipe=recipe):
        expected = layer(x)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert layer(x).shape == expected.shape
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("optimizer", [cg.optim.FusedAdam, cg.optim.FusedSGD], ids=lambda kind: kind.__name__)
def test_fused_optimizers_do_not_mix_numbers_with_fake_moments(optimizer):
    def stepped(made):
        step(made)
        optimizer(made.parameters(), lr=0.1).step()

    with FakeTensorMode():
        stepped(model("mxfp8"))
    made = model("mxfp8")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="under the mode too"):
        stepped(made)


def test_seeds_by_layer_and_records_of_draws_do_not_notice_a_dry_run():
    def gradients(dry):
        with cg.draws_by_layer(1), (record := DrawRecord()).recording():
            torch.manual_seed(0)
            made = model("nvfp4")
            if dry:
                with FakeTensorMode():
                    step(model("nvfp4"))
            return [*step(made), torch.tensor(record.count)]

    for mine, known in zip(gradients(dry=True), gradients(dry=False), strict=True):
        assert torch.equal(mine, known)


@pytest.mark.parametrize("name", RECIPES)
def test_make_fx_does_not_record_what_follows_from_numbers(name):
    with pytest.raises(NotImplementedError, match="cannot be recorded by make_fx with numbers"):
        make_fx(model(RECIPES[name]), tracing_mode="real")(torch.randn(32, 64))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_make_fx_records_fake_tensors(name):
    made, x = model(RECIPES[name]), torch.randn(32, 64)
    weights = dict(made.named_parameters())
    with torch.no_grad():
        recorded = make_fx(lambda weights, x: functional_call(made, weights, x), tracing_mode="fake")(weights, x)
        assert torch.equal(recorded(weights, x), made(x))


def test_make_fx_does_not_record_the_seed_of_a_random_rounding():
    with pytest.raises(NotImplementedError, match=r"grad_output: stochastic rounding cannot be recorded"):
        make_fx(lambda x: step_of(model("nvfp4"), x), tracing_mode="fake")(torch.randn(32, 64))


def test_make_fx_records_how_planes_are_decoded():
    """Kernels are no operations, so they are not used there."""
    q = cg.quantize(torch.randn(32, 64), "mxfp8")
    found = make_fx(lambda x: q.dequantize() + x, tracing_mode="real")(torch.zeros(32, 64))(torch.zeros(32, 64))
    assert torch.equal(found, q.dequantize())


def test_workspaces_are_not_recorded():
    seen = []
    make_fx(lambda x: x + len(seen) * (seen.append(workspace("gemm.a", 8)) is None), tracing_mode="real")(torch.ones(1))
    assert seen == [None]


@pytest.mark.parametrize("recipe", ["fp8", cg.recipe.DelayedScaling(fp8_dpa=True)], ids=["current", "delayed"])
def test_modules_without_parameters(recipe):
    """Nothing but the mode tells whether their states are fake."""
    with FakeTensorMode(), cg.autocast(recipe=recipe):
        x = torch.randn(32, 2, 64, requires_grad=True)
        cg.TransformerLayer(64, 128, 2)(x).sum().backward()
    assert x.grad.shape == x.shape


def test_a_dry_run_may_be_the_first_thing_in_a_process():
    """What is imported in it makes no tensors that are kept."""
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tests.linear.test_without_numbers import model, step
with FakeTensorMode():
    step(model("fp8"))
assert all(result.isfinite().all() for result in step(model("fp8")))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
