"""Fusions: which are made, and where they round."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import crossgrain as cg
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
    "activation_bias": (
        lambda: [_linear(), ops.SReLU(), _linear()],
        0,
        fused.BackwardActivationBias,
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


def _quantized_alike(tensor: Tensor, recipe: str | None) -> tuple[Tensor, Tensor]:
    """What the GEMMs read of a tensor in fp32, rowwise and columnwise."""
    if recipe is None:
        return tensor.float(), tensor.float()
    quantizer = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)
    made = []
    for rowwise in (True, False):
        quantizer.set_usage(rowwise=rowwise, columnwise=not rowwise)
        made.append(quantizer(tensor).dequantize(dtype=torch.float32))
    return made[0], made[1]


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


ROUNDING = pytest.mark.parametrize("recipe", [None, "mxfp8"])


@ROUNDING
@pytest.mark.parametrize("case", ["add", "bias_add", "scale_add", "bias"])
def test_a_fused_forward_rounds_once(case: str, recipe: str | None) -> None:
    """The sum in fp32, of what the GEMM reads, rounded to bf16 at the end."""
    linear, bias, add = ops.BasicLinear(64, 64), ops.Bias(64), ops.AddExtraInput(in_place=True)
    torch.nn.init.normal_(bias.bias)
    scale = 0.3 if case == "scale_add" else 1.0
    after: dict[str, list[Any]] = {
        "add": [add],
        "bias_add": [bias, add],
        "scale_add": [ops.ConstantScale(scale), add],
        "bias": [bias],
    }
    block = ops.Sequential(linear, *after[case]).to(torch.bfloat16)
    x, extra = (torch.randn(32, 64, dtype=torch.bfloat16) for _ in range(2))
    product = _quantized_alike(x, recipe)[0] @ _quantized_alike(linear.weight.detach(), recipe)[0].t()
    wanted = product * scale + bias.bias.float() if "bias" in case else product * scale
    wanted = (wanted + extra.float() if "add" in case else wanted).to(torch.bfloat16)
    with torch.no_grad(), quantized(None if recipe is None else RECIPES[recipe]()):
        y = block(x, *([extra] if "add" in case else []))
    assert len(block._module_groups[0]._forward_ops) == 1
    assert torch.equal(y, wanted)
    if "add" in case:
        assert y.data_ptr() == extra.data_ptr()


@ROUNDING
def test_backward_of_linear_and_scale_is_one_fusion_and_rounds_once(recipe: str | None) -> None:
    linear = ops.BasicLinear(64, 64, dtype=torch.bfloat16)
    block = ops.Sequential(linear, ops.ConstantScale(-0.7))
    x, dy = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(32, 64, dtype=torch.bfloat16)
    with quantized(None if recipe is None else RECIPES[recipe]()):
        y = block(x)
    assert _kinds(block._module_groups[0]._backward_ops) == [fused.BackwardLinearScale]
    dx, dw = torch.autograd.grad(y, [x, linear.weight], dy)
    dy_rows, dy_columns = _quantized_alike(dy, recipe)
    w, kept = _quantized_alike(linear.weight.detach(), recipe)[1], _quantized_alike(x.detach(), recipe)[1]
    assert torch.equal(dx, ((dy_rows @ w) * -0.7).to(torch.bfloat16))
    assert torch.equal(dw, ((dy_columns.t() @ kept) * -0.7).to(torch.bfloat16))


def test_the_scale_reaches_main_grad() -> None:
    linear = ops.BasicLinear(64, 64, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.ones(64, 64)
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    ops.Sequential(linear, ops.ConstantScale(0.5))(x).backward(dy)
    assert torch.equal(linear.weight.main_grad, 1 + (dy.t() @ x) * 0.5)


@ROUNDING
def test_backward_of_branch_and_linear_rounds_once(recipe: str | None) -> None:
    linear = ops.BasicLinear(64, 64, dtype=torch.bfloat16)
    block = ops.Sequential(ops.Identity(), ops.MakeExtraOutput(in_place=True), linear)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    dy, branch = (torch.randn(32, 64, dtype=torch.bfloat16) for _ in range(2))
    with quantized(None if recipe is None else RECIPES[recipe]()):
        outputs = block(x)
    assert fused.BackwardLinearAdd in _kinds(block._module_groups[0]._backward_ops)
    dgrad = _quantized_alike(dy, recipe)[0] @ _quantized_alike(linear.weight.detach(), recipe)[1]
    wanted = (dgrad + branch.float()).to(torch.bfloat16)
    (dx,) = torch.autograd.grad(outputs, [x], [dy, branch])
    assert torch.equal(dx, wanted)


def test_backward_of_branch_and_rmsnorm_rounds_once() -> None:
    """The gradient of the norm alone in fp32, plus that of the branch, rounded at the end."""
    block = ops.Sequential(ops.Identity(), ops.MakeExtraOutput(), ops.RMSNorm(64))
    x, dy, branch = (torch.randn(32, 64).bfloat16() for _ in range(3))
    x.requires_grad_()
    (dx,) = torch.autograd.grad(block(x), [x], [dy, branch])
    assert fused.BackwardAddRMSNorm in _kinds(block._module_groups[0]._backward_ops)
    wide = x.detach().float().requires_grad_()
    (of_norm,) = torch.autograd.grad(block[2](wide), [wide], [dy.float()])
    assert torch.equal(dx, (of_norm + branch.float()).bfloat16())


@pytest.mark.parametrize("in_place", [False, True])
def test_in_place_decides_which_branches_are_fused(in_place: bool) -> None:
    """A sum in the memory of the branch is dgrad's; a norm makes memory of its own."""
    for last, kind, wanted in (
        (ops.BasicLinear(64, 64), fused.BackwardLinearAdd, in_place),
        (ops.RMSNorm(64), fused.BackwardAddRMSNorm, not in_place),
    ):
        block = ops.Sequential(ops.Identity(), ops.MakeExtraOutput(in_place=in_place), last)
        block(torch.randn(4, 64, requires_grad=True))
        assert (kind in _kinds(block._module_groups[0]._backward_ops)) == wanted


def test_products_that_ranks_sum_are_not_fused() -> None:
    """The sum over ranks comes between the GEMM and the next operation."""
    from crossgrain.ops.fused.backward import fuse_backward_linear_add, fuse_backward_linear_scale
    from crossgrain.ops.fused.forward_linear import fuse_forward_linear_bias_add, fuse_forward_linear_scale_add

    linear, scale, add = ops.BasicLinear(8, 8), ops.ConstantScale(2.0), ops.AddExtraInput(in_place=True)
    branch = ops.MakeExtraOutput(in_place=True)
    for mode, fuse, given in (
        ("row", fuse_forward_linear_bias_add, [linear, add]),
        ("row", fuse_forward_linear_scale_add, [linear, scale, add]),
        ("column", fuse_backward_linear_add, [branch, linear]),
        ("column", fuse_backward_linear_scale, [linear, scale]),
    ):
        linear.tensor_parallel_mode = None
        assert len(fuse(given, recipe=None)) == 1
        linear.tensor_parallel_mode = mode
        assert fuse(given, recipe=None) == given


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
    op = fused.BackwardLinearScale([ops.BasicLinear(8, 8), ops.ConstantScale(1.0)])
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
