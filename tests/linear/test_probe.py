"""Probes see all tensors of a call, and change only what they return something else for."""

import pytest
import torch

import crossgrain as cg
from crossgrain.linear import probe
from crossgrain.planes import COLUMNWISE, ROWWISE, Plane


class Recorder:
    """A probe that keeps all it sees, and multiplies results of some GEMMs."""

    def __init__(self, factors=None, blind=()):
        self.seen, self.factors, self.blind = {}, factors or {}, blind

    def forward(self, x, weight, x_operands, weight_operands):
        self.seen |= {"x": x.detach().clone(), "w": weight.detach().clone()}
        self.seen |= {"x planes": x_operands, "w planes": weight_operands}

    def backward(self, dy, rows, columns):
        self.seen |= {"dy": dy.clone(), "dy planes": (rows, columns)}

    def result(self, gemm, value):
        self.seen[gemm] = value.clone()
        return value * self.factors[gemm] if gemm in self.factors else value

    def watches(self, gemm):
        return gemm not in self.blind

    def modifies(self, gemm):
        return gemm in self.factors


@pytest.fixture
def attached():
    """``attached(probe)`` gives it to all calls that follow."""
    installed = []

    def attach_all(given):
        def attach(module, index, weight, call):
            call.probe = given

        probe.install(attach)
        installed.append(attach)
        return given

    yield attach_all
    for each in installed:
        probe.remove(each)
    assert probe.attach is None


def step(layer, x, *splits):
    x = x.clone().requires_grad_()
    y = layer(x, *splits)
    y.square().sum().backward()
    found = {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    layer.zero_grad()
    return found


def made(recipe, rows=40, sizes=(48, 24)):
    torch.manual_seed(0)
    layer = cg.Linear(*sizes)
    layer.bound_recipe = None if recipe is None else cg.GemmRecipe.load(recipe)
    return layer, torch.randn(rows, sizes[0])


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)", "fp8"])
def test_a_probe_that_only_looks_changes_no_bit_and_sees_every_tensor(recipe, attached):
    layer, x = made(recipe)
    torch.manual_seed(1)
    expected = step(layer, x)
    seen = attached(Recorder()).seen
    torch.manual_seed(1)
    assert equal(step(layer, x), expected)
    assert torch.equal(seen["x"], x) and torch.equal(seen["w"], layer.weight.detach())
    assert torch.equal(seen["fprop"], expected["y"])
    assert torch.equal(seen["dgrad"], expected["dx"]) and torch.equal(seen["wgrad"], expected["weight"])
    assert torch.equal(seen["dy"], 2 * expected["y"])
    if recipe is not None:
        for name in ("x", "w", "dy"):
            rows, columns = seen[f"{name} planes"]
            assert isinstance(rows, Plane) and rows.direction is ROWWISE
            assert isinstance(columns, Plane) and columns.direction is COLUMNWISE


def test_results_are_what_the_probe_returns(attached):
    layer, x = made("mxfp8")
    expected = step(layer, x)
    attached(Recorder({"dgrad": 2, "wgrad": 4}))
    found = step(layer, x)
    assert torch.equal(found["dx"], 2 * expected["dx"]) and torch.equal(found["weight"], 4 * expected["weight"])
    probe.remove(probe.attach)
    attached(Recorder({"fprop": 2}))
    assert torch.equal(layer(x).detach(), 2 * expected["y"])


@pytest.mark.parametrize("sizes", [(64, 32), (48, 24)])
def test_gradients_that_are_added_to_main_grad_are_seen_and_added_as_ever(sizes, attached):
    """A GEMM adds to it, or, if the weight is padded, its result is added."""
    layer, x = made("mxfp8", sizes=sizes)
    layer.fuse_wgrad_accumulation = True

    def main_grad():
        layer.weight.main_grad = torch.linspace(0, 1, layer.weight.numel()).view(layer.weight.shape).clone()
        step(layer, x)
        return layer.weight.main_grad

    expected, plain = main_grad(), step(*made("mxfp8", sizes=sizes))["weight"]
    seen = attached(Recorder()).seen
    assert torch.equal(main_grad(), expected) and torch.equal(seen["wgrad"], plain)
    probe.remove(probe.attach)
    attached(Recorder({"wgrad": 0}))
    start = torch.linspace(0, 1, layer.weight.numel()).view(layer.weight.shape)
    assert torch.equal(main_grad(), start)
    probe.remove(probe.attach)
    seen = attached(Recorder(blind=("wgrad",))).seen
    assert torch.equal(main_grad(), expected) and "wgrad" not in seen


def test_groups_are_seen_one_by_one(attached):
    torch.manual_seed(0)
    layer = cg.GroupedLinear(2, 32, 16, name="experts")
    layer.bound_recipe = cg.GemmRecipe.load("mxfp8")
    x, found = torch.randn(40, 32), {}
    expected = step(layer, x, [24, 16])

    def attach(module, index, weight, call):
        assert module.linear_roles()[index].name == "experts"
        call.probe = found[index] = Recorder()

    probe.install(attach)
    try:
        assert equal(step(layer, x, [24, 16]), expected)
    finally:
        probe.remove(attach)
    assert torch.equal(torch.cat([found[g].seen["fprop"] for g in range(2)]), expected["y"])
    assert torch.equal(found[1].seen["x"], x[24:]) and torch.equal(found[1].seen["wgrad"], expected["weight1"])


def test_only_one_can_look_at_a_time(attached):
    attached(Recorder())
    with pytest.raises(RuntimeError, match="only one can do so at a time"):
        probe.install(lambda module, index, weight, call: None)
    probe.remove(print)  # was not installed
    assert probe.attach is not None


def test_layers_in_graphs_of_the_compiler_run_in_eager_mode_while_somebody_looks(attached):
    layer, x = made("mxfp8", 32)
    expected = layer(x).detach()
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(compiled(x).detach(), expected)
    seen = attached(Recorder()).seen
    with pytest.raises(RuntimeError, match="part of a compiled graph, in which nobody can look into it"):
        compiled(x)
    torch._dynamo.reset()
    assert torch.equal(compiled(x).detach(), expected) and torch.equal(seen["fprop"], expected)
