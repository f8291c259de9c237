"""Activations against torch's formulas in double precision."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from crossgrain import ops
from crossgrain.gemm.activations import ACTIVATIONS, activation, deinterleaved, interleaved
from crossgrain.ops import basic

from ...common.logs import warned
from ...common.ops_cases import RECIPES, assert_close, assert_same, grads_of


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gated(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        gate, rest = x.chunk(2, -1)
        return f(gate) * rest

    return gated


def _clamped_swiglu(x: Tensor) -> Tensor:
    gate, rest = x.chunk(2, -1)
    gate, rest = gate.clamp(max=7.0), rest.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (rest + 1)


def _situglu(x: Tensor) -> Tensor:
    gate, rest = x.chunk(2, -1)
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(rest / 25)


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": _gelu,
    "GEGLU": _gated(_gelu),
    "GLU": _gated(torch.sigmoid),
    "QGELU": _qgelu,
    "QGEGLU": _gated(_qgelu),
    "ReLU": torch.relu,
    "ReGLU": _gated(torch.relu),
    "SReLU": _srelu,
    "SReGLU": _gated(_srelu),
    "SiLU": F.silu,
    "SwiGLU": _gated(F.silu),
    "ClampedSwiGLU": _clamped_swiglu,
    "SiTUGLU": _situglu,
}
SCALED = {
    "ScaledSwiGLU": _gated(F.silu),
    "ScaledSReLU": _srelu,
    "ScaledSiTUGLU": _situglu,
    "ScaledClampedQGeGLU": _clamped_swiglu,
}


def _input(dtype: torch.dtype = torch.float32) -> Tensor:
    """Some numbers beyond the clamps."""
    return (torch.randn(4, 8, 32) * 4).to(dtype).requires_grad_()


def _expected(f: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
    x64 = x.detach().double().requires_grad_()
    y = f(x64)
    return [y.detach(), *torch.autograd.grad(y, [x64], dy.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", REFERENCE)
def test_value_and_gradient(name: str, dtype: torch.dtype) -> None:
    x, op = _input(dtype), getattr(ops, name)()
    dy = torch.randn_like(REFERENCE[name](x))
    assert_close(grads_of(lambda: op(x), [x], dy), _expected(REFERENCE[name], x, dy), dtype)


@pytest.mark.parametrize("name", REFERENCE)
def test_gradient_from_a_quantized_input_is_near(name: str) -> None:
    x, op = _input(), getattr(ops, name)(cache_quantized_input=True)
    dy = torch.randn_like(REFERENCE[name](x))
    y, dx = grads_of(lambda: op(x), [x], dy)
    wanted_y, wanted_dx = _expected(REFERENCE[name], x, dy)
    assert_close([y], [wanted_y], torch.float32)
    # E4M3 has 3 bits after the leading one, and the gradient is at most quadratic in x.
    assert (dx - wanted_dx).norm() < 0.2 * wanted_dx.norm()


@pytest.mark.parametrize("name", SCALED)
def test_scaled_by_rows(name: str) -> None:
    x, scales, op = _input(), torch.rand(4, 8, requires_grad=True), getattr(ops, name)()
    dy = torch.randn_like(SCALED[name](x))
    x64, scales64 = (t.detach().double().requires_grad_() for t in (x, scales))
    y = SCALED[name](x64) * scales64.unsqueeze(-1)
    wanted = [y.detach(), *torch.autograd.grad(y, [x64, scales64], dy.double())]
    assert_close(grads_of(lambda: op(x, scales), [x, scales], dy), wanted, torch.float32)


def test_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a scale for each row"):
        ops.ScaledSwiGLU()(_input(), torch.ones(8))


@pytest.mark.parametrize("name", ["SwiGLU", "ClampedSwiGLU", "SiTUGLU"])
def test_interleaved_halves(name: str) -> None:
    """Blocks of gate and linear that alternate give what contiguous halves give."""
    plain, mixed = getattr(ops, name)(), getattr(ops, name)(glu_interleave_size=4)
    x = _input()
    dy = torch.randn(4, 8, 16)
    y, dx = grads_of(lambda: plain(x), [x], dy)
    x_mixed = interleaved(x.detach(), 4).requires_grad_()
    y_mixed, dx_mixed = grads_of(lambda: mixed(x_mixed), [x_mixed], dy)
    assert_same([y, dx], [y_mixed, deinterleaved(dx_mixed, 4)])


@pytest.mark.parametrize("name", ["ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"])
def test_scaled_interleaved(name: str) -> None:
    x, scales = _input(), torch.rand(4, 8)
    cls = getattr(ops, name)
    assert torch.equal(cls()(x, scales), cls(glu_interleave_size=8)(interleaved(x, 8), scales))


def test_interleaving_alternates_blocks() -> None:
    x = torch.arange(8)
    assert interleaved(x, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert torch.equal(deinterleaved(interleaved(x, 2), 2), x)


def test_odd_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 2, got shape"):
        ops.SwiGLU()(torch.randn(3, 5))
    with pytest.raises(ValueError, match="must be a multiple of 8, got shape"):
        ops.SwiGLU(glu_interleave_size=4)(torch.randn(3, 12))


def test_all_names_have_an_activation() -> None:
    for name in ACTIVATIONS:
        y = activation(name).forward(torch.randn(2, 8))
        assert y.shape == ((2, 4) if activation(name).gated else (2, 8))
    with pytest.raises(ValueError, match="no activation 'gelo'"):
        activation("gelo")
    with pytest.raises(TypeError, match="the activation gelu has no options"):
        activation("gelu", limit=3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_is_handed_on_quantized(recipe: str) -> None:
    """A linear layer after an activation computes the same whether it is handed a quantized tensor or not."""
    linear, gelu, x = ops.Linear(64, 32), ops.GELU(), torch.randn(32, 64, requires_grad=True)
    dy = torch.randn(32, 32)
    together = copy.deepcopy(ops.Sequential(gelu, linear))
    a = grads_of(lambda: together(x), [x, *together.parameters()], dy, RECIPES[recipe]())
    b = grads_of(lambda: linear(gelu(x)), [x, *linear.parameters()], dy, RECIPES[recipe]())
    assert_same(a, b)


def test_every_activation_is_exported() -> None:
    assert {*REFERENCE, *SCALED} <= set(basic.__all__)


def test_arguments_of_scaled_activations_are_checked() -> None:
    for size in (0, -4, 2.5, True):
        with pytest.raises(ValueError, match="glu_interleave_size must be a positive int or None"):
            ops.ScaledSwiGLU(glu_interleave_size=size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scales of the rows must be floating-point numbers, got torch.int64"):
        ops.ScaledSReLU()(torch.randn(3, 8), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("name", ["ScaledSwiGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"])
def test_recomputing_the_activation_changes_no_result_and_says_that_it_saves_nothing(name: str) -> None:
    x, scales = torch.randn(3, 8), torch.randn(3)
    with warned(f"{name}: activation_recompute_in_mlp=True changes no result, but saves no"):
        op = getattr(ops, name)(activation_recompute_in_mlp=True)
    assert op.activation_recompute_in_mlp
    assert torch.equal(op(x, scales), getattr(ops, name)()(x, scales))
