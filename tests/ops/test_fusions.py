"""Fusions: which are made, and that they change no bit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from crossgrain import ops
from crossgrain.ops import fused
from crossgrain.ops.fuser import OperationFuser
from crossgrain.ops.fusions import fuse_windows
from crossgrain.recipe import MXFP8BlockScaling

from ..common.ops_cases import RECIPES, assert_same, quantized


@pytest.fixture
def fusions(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches all fusions off, and on again."""
    names = ("forward_fusion_functions", "backward_fusion_functions", "forward_backward_fusion_functions")
    known = {name: list(getattr(OperationFuser, name)) for name in names}

    def switch(on: bool) -> None:
        for name in names:
            monkeypatch.setattr(OperationFuser, name, list(known[name]) if on else [])

    switch(True)
    return switch


def _linear(bias: bool = True) -> ops.Linear:
    op = ops.Linear(64, 64, bias=bias)
    if bias:
        torch.nn.init.normal_(op.bias)
    return op


# Name: the sequence, its number of extra inputs, the fused operation, and whether it is one of backward.
CASES: dict[str, tuple[Callable[[], Sequence[Any]], int, type, bool]] = {
    "linear_bias": (lambda: [_linear()], 0, fused.ForwardLinearBiasActivation, False),
    "linear_bias_gelu": (lambda: [_linear(), ops.GELU()], 0, fused.ForwardLinearBiasActivation, False),
    "linear_bias_swiglu": (
        lambda: [_linear(), ops.SwiGLU(cache_quantized_input=True)],
        0,
        fused.ForwardLinearBiasActivation,
        False,
    ),
    "linear_add": (lambda: [_linear(False), ops.AddExtraInput(in_place=True)], 1, fused.ForwardLinearBiasAdd, False),
    "linear_bias_add": (lambda: [_linear(), ops.AddExtraInput(in_place=True)], 1, fused.ForwardLinearBiasAdd, False),
    "linear_scale_add": (
        lambda: [_linear(False), ops.ConstantScale(0.3), ops.AddExtraInput(in_place=True)],
        1,
        fused.ForwardLinearScaleAdd,
        False,
    ),
    "activation_bias": (
        lambda: [_linear(), ops.SReLU(), _linear()],
        0,
        fused.BackwardActivationBias,
        True,
    ),
    "add_rmsnorm": (lambda: [_linear(), ops.MakeExtraOutput(), ops.RMSNorm(64)], 0, fused.BackwardAddRMSNorm, True),
    "linear_backward_add": (
        lambda: [_linear(), ops.MakeExtraOutput(), _linear()],
        0,
        fused.BackwardLinearAdd,
        True,
    ),
    "linear_backward_add_in_place": (
        lambda: [_linear(), ops.MakeExtraOutput(in_place=True), _linear()],
        0,
        fused.BackwardLinearAdd,
        True,
    ),
    "linear_backward_scale": (
        lambda: [_linear(), ops.ConstantScale(-0.7), _linear()],
        0,
        fused.BackwardLinearScale,
        True,
    ),
}


def _run(block: ops.Sequential, extras: int, recipe: str | None, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(11)
    x = torch.randn(32, 64, dtype=dtype).requires_grad_()
    inputs = [torch.randn(32, 64, dtype=dtype).requires_grad_() for _ in range(extras)]
    given = [extra * 1 for extra in inputs]  # not leaves: they may be written to
    with quantized(None if recipe is None else RECIPES[recipe]()):
        result = block(x, *given)
    outputs = result if isinstance(result, tuple) else (result,)
    # The extra output and the output get gradients of their own.
    grads = [torch.randn_like(out) for out in outputs]
    tensors = [x, *inputs, *block.parameters()]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, tensors, grads)]


def _kinds(placed: Any) -> list[type]:
    return [type(op) for op, _ in placed]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [None, "mxfp8", "nvfp4", "fp8", "hybrid_mxfp8_nvfp4"])
@pytest.mark.parametrize("case", CASES)
def test_fused_is_unfused(case: str, recipe: str | None, dtype: torch.dtype, fusions: Callable[[bool], None]) -> None:
    make, extras, kind, in_backward = CASES[case]
    block = ops.Sequential(*make()).to(dtype)
    together = _run(block, extras, recipe, dtype)
    (group,) = block._module_groups
    placed = group._backward_ops if in_backward else group._forward_ops
    expected = kind is not fused.BackwardActivationBias or recipe is not None
    assert (kind in _kinds(placed)) == expected
    fusions(False)
    alone = _run(block, extras, recipe, dtype)
    assert _kinds(group._forward_ops) == _kinds(group._backward_ops) == [type(op) for op in group._basic_ops]
    assert_same(together, alone)


def test_positions_of_fused_operations() -> None:
    block = ops.Sequential(ops.LayerNorm(64), _linear(), ops.GELU(), _linear(False))
    block(torch.randn(4, 64, requires_grad=True))
    (group,) = block._module_groups
    assert [indices for _, indices in group._forward_ops] == [[0], [1, 2, 3], [4]]
    assert [indices for _, indices in group._backward_ops] == [[0], [1], [2], [3], [4]]
    assert len(group._basic_ops) == 5


def test_an_addition_that_is_not_in_place_is_not_fused() -> None:
    block = ops.Sequential(_linear(False), ops.AddExtraInput())
    block(torch.randn(4, 64), torch.randn(4, 64))
    assert _kinds(block._module_groups[0]._forward_ops) == [ops.BasicLinear, ops.AddExtraInput]


def test_fusing_follows_the_recipe() -> None:
    block = ops.Sequential(ops.Bias(64), ops.GELU())
    x = torch.randn(32, 64)
    block(x)
    assert _kinds(block._module_groups[0]._backward_ops) == [ops.Bias, ops.GELU]
    with quantized(MXFP8BlockScaling()):
        block(x)
    assert _kinds(block._module_groups[0]._backward_ops) == [fused.BackwardActivationBias]


def test_backward_is_not_fused_over_operations_without_backward() -> None:
    """Nobody wants the gradient of the input, so the branch has no backward pass to take part in."""
    block = ops.Sequential(ops.MakeExtraOutput(), _linear(False))
    y, _ = block(torch.randn(4, 64))
    assert _kinds(block._module_groups[0]._backward_ops) == [ops.MakeExtraOutput, ops.BasicLinear]
    y.sum().backward()
    assert block[1].weight.grad is not None


# ---- fusions of users ------------------------------------------------------------------------------


class _Doubling(ops.FusedOperation):
    """Two scalings in one, with both passes."""

    def _factor(self) -> float:
        return self.basic_ops[0].scale * self.basic_ops[1].scale

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
        return input_ * self._factor(), [(), ()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **kwargs: Any) -> Any:
        return grad_output * self._factor(), [(), ()], [(), ()]


def _fuse_scales(ops_: list[Any], *, recipe: Any) -> list[Any]:
    def replacement(window: list[Any]) -> _Doubling | None:
        return _Doubling(window) if all(isinstance(op, ops.ConstantScale) for op in window) else None

    return fuse_windows(ops_, 2, replacement)


@pytest.mark.parametrize("register", ["forward", "backward", "forward_backward"])
def test_registered_fusions(register: str, fusions: Callable[[bool], None]) -> None:
    block = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(4.0), ops.Identity())
    x = torch.randn(3, requires_grad=True)
    block(x)
    getattr(ops, f"register_{register}_fusion")(_fuse_scales, prepend=True)
    y = block(x)
    (group,) = block._module_groups
    assert (_Doubling in _kinds(group._forward_ops)) == ("forward" in register)
    assert (_Doubling in _kinds(group._backward_ops)) == ("backward" in register)
    y.sum().backward()
    assert torch.equal(y, x * 8) and torch.equal(x.grad, torch.full((3,), 8.0))


def test_order_of_registration(fusions: Callable[[bool], None]) -> None:
    ops.register_forward_fusion(_fuse_scales)
    assert OperationFuser.forward_fusion_functions[-1] is _fuse_scales
    ops.register_backward_fusion(_fuse_scales, prepend=True)
    assert OperationFuser.backward_fusion_functions[0] is _fuse_scales


def test_a_fusion_that_loses_operations_is_refused(fusions: Callable[[bool], None]) -> None:
    def lossy(ops_: list[Any], *, recipe: Any) -> list[Any]:
        return ops_[1:]

    ops.register_forward_fusion(lossy)
    with pytest.raises(RuntimeError, match="the fusion lossy turned .Identity, ConstantScale. into .ConstantScale."):
        ops.Sequential(ops.Identity(), ops.ConstantScale(2.0))(torch.randn(3))


def test_an_operation_without_a_pass_says_so() -> None:
    op = fused.BackwardLinearScale([ops.ConstantScale(1.0), ops.BasicLinear(8, 8)])
    with pytest.raises(NotImplementedError, match="BackwardLinearScale has no forward pass of its own"):
        op.fuser_forward(
            [],
            torch.randn(1),
            basic_op_extra_inputs=[],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[],
        )
    assert op.is_fused_op and not op.basic_ops[0].is_fused_op
    with pytest.raises(ValueError, match="at least one basic operation"):
        ops.FusedOperation([])
