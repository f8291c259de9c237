"""Norms, biases, quantize, dropout, shapes."""

import copy

import pytest
import torch
from torch import Tensor

import crossgrain as cg
from crossgrain import ops
from crossgrain.recipe import CustomRecipe, MXFP8BlockScaling, zoo

from ...common.ops_cases import RECIPES, TWINS, assert_close, assert_same, grads_of, quantized


def _norm_reference(op: ops.LayerNorm | ops.RMSNorm, x: Tensor) -> Tensor:
    shape = op.normalized_shape
    weight = op.weight + 1 if op.zero_centered_gamma else op.weight
    if isinstance(op, ops.LayerNorm):
        return torch.nn.functional.layer_norm(x, shape, weight, op.bias, op.eps)
    return torch.nn.functional.rms_norm(x, shape, weight, op.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [24, (4, 6)])
@pytest.mark.parametrize("kind", [ops.LayerNorm, ops.RMSNorm])
def test_norms(kind: type, shape: int | tuple[int, ...], zero_centered: bool, dtype: torch.dtype) -> None:
    op = kind(shape, zero_centered_gamma=zero_centered, eps=1e-3, dtype=dtype)
    for parameter in op.parameters():
        torch.nn.init.normal_(parameter)
    size = (5, shape) if isinstance(shape, int) else (5, *shape)
    x, dy = torch.randn(3, *size, dtype=dtype, requires_grad=True), torch.randn(3, *size, dtype=dtype)
    wide = copy.deepcopy(op).double()
    x64 = x.detach().double().requires_grad_()
    wanted = grads_of(lambda: _norm_reference(wide, x64), [x64, *wide.parameters()], dy.double())
    made = grads_of(lambda: op(x), [x, *op.parameters()], dy)
    # Parameter gradients in bf16 are sums of 15 numbers, rounded once: relative to the largest of them.
    assert_close([t / t.abs().max() for t in made], [t / t.abs().max() for t in wanted], dtype)


def test_norms_start_without_effect() -> None:
    x = torch.randn(4, 32)
    for zero_centered in (False, True):
        op = ops.LayerNorm(32, zero_centered_gamma=zero_centered, device="meta")
        assert_close([op(x)], [torch.nn.functional.layer_norm(x, (32,))], torch.float32)
    with pytest.raises(ValueError, match="last dimensions of the input must be .32."):
        ops.RMSNorm(32)(torch.randn(4, 31))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [ops.LayerNorm, ops.RMSNorm])
def test_norm_output_is_handed_on_quantized(kind: type, recipe: str) -> None:
    block = ops.Sequential(kind(64), ops.Linear(64, 32))
    apart = copy.deepcopy(block)
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 32)
    made_recipe = RECIPES[recipe]()
    assert_same(
        grads_of(lambda: block(x), [x, *block.parameters()], dy, made_recipe),
        grads_of(lambda: apart[1](apart[0](x)), [x, *apart.parameters()], dy, made_recipe),
    )


class _Spy(ops.Identity):
    """Keeps what is handed on in both directions."""

    def op_forward(self, ctx, input_, **kwargs):  # type: ignore[no-untyped-def]
        self.input, self.ctx = input_, ctx
        return super().op_forward(ctx, input_, **kwargs)

    def op_backward(self, ctx, grad_output):  # type: ignore[no-untyped-def]
        self.grad = grad_output
        return super().op_backward(ctx, grad_output)


def test_neighbours_quantize_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activation hands the second layer its input, and the first layer its gradient, as they want them."""
    seen: dict[str, Tensor] = {}
    forward, backward = ops.BasicLinear.gemm_forward, ops.BasicLinear.gemm_backward

    def spy_forward(self, ctx, x, **kwargs):  # type: ignore[no-untyped-def]
        seen[f"{self.name} x"] = x
        return forward(self, ctx, x, **kwargs)

    def spy_backward(self, ctx, dy, **kwargs):  # type: ignore[no-untyped-def]
        seen[f"{self.name} dy"] = dy
        return backward(self, ctx, dy, **kwargs)

    monkeypatch.setattr(ops.BasicLinear, "gemm_forward", spy_forward)
    monkeypatch.setattr(ops.BasicLinear, "gemm_backward", spy_backward)
    block = ops.Sequential(
        ops.BasicLinear(64, 64, name="a"), ops.Bias(64), ops.GELU(), ops.BasicLinear(64, 64, name="b")
    )
    x = torch.randn(32, 64, requires_grad=True)
    with quantized(MXFP8BlockScaling()):
        block(x).sum().backward()
    assert {name: isinstance(tensor, cg.MXFP8Tensor) for name, tensor in seen.items()} == {
        "a x": False,
        "b x": True,
        "b dy": False,
        "a dy": True,
    }
    assert seen["b x"].get_usages() == seen["a dy"].get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("factory", [zoo.mxfp8_fwd_nvfp4_bwd_factory, zoo.mxfp8_fwd_high_precision_bwd_factory])
@pytest.mark.parametrize("rows, width", [(32, 64), (20, 64), (32, 40)])
def test_shapes_that_do_not_fit_blocks_are_handed_on_as_they_are(factory: object, rows: int, width: int) -> None:
    block = ops.Sequential(ops.BasicLinear(width, width), ops.GELU(), ops.BasicLinear(width, width))
    x, dy = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)
    recipe = CustomRecipe(qfactory=factory)
    together = grads_of(lambda: block(x), [x, *block.parameters()], dy, recipe)
    apart = grads_of(lambda: block[2](block[1](block[0](x))), [x, *block.parameters()], dy, recipe)
    assert_same(together, apart)


def test_bias() -> None:
    op = ops.Bias(8)
    torch.nn.init.normal_(op.bias)
    x, dy = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    assert_close(
        grads_of(lambda: op(x), [x, op.bias], dy), grads_of(lambda: x + op.bias, [x, op.bias], dy), torch.float32
    )
    op.bias.requires_grad_(False)
    op(x).sum().backward()
    assert op.bias.grad is None


@pytest.mark.parametrize("forward, backward", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8", "hybrid_mxfp8_nvfp4"])
def test_quantize(forward: bool, backward: bool, recipe: str) -> None:
    op, spy = ops.Quantize(forward=forward, backward=backward), _Spy()
    x = torch.randn(32, 64, requires_grad=True)
    block = ops.Sequential(spy, op)
    with quantized(RECIPES[recipe]()):
        y = block(x)
    assert isinstance(y, cg.QuantizedTensor) == forward
    y.backward(torch.randn(32, 64))
    assert isinstance(spy.grad, cg.QuantizedTensor) == backward
    assert op.num_quantizers("forward") == forward and op.num_quantizers("backward") == backward
    assert torch.equal(block(x), x), "without a recipe nothing is quantized"


@pytest.mark.parametrize("name", TWINS)
def test_quantize_by_hybrid_of_twins(name: str) -> None:
    op, x = ops.Quantize(), torch.randn(128, 128)
    decoded = []
    for recipe in TWINS[name]:
        torch.manual_seed(0)
        with quantized(recipe()):
            decoded.append(op(x).dequantize())
    assert torch.equal(*decoded)


def test_l2_normalization() -> None:
    op = ops.L2Normalization(eps=1e-2)
    x, dy = torch.randn(3, 4, 16, requires_grad=True), torch.randn(3, 4, 16)
    reference = grads_of(lambda: x / (x.square().sum(-1, keepdim=True) + 1e-2).sqrt(), [x], dy)
    assert_close(grads_of(lambda: op(x), [x], dy), reference, torch.float32)


def test_constant_scale_identity_reshape() -> None:
    x, dy = torch.randn(4, 6, requires_grad=True), torch.randn(2, 12)
    block = ops.Sequential(ops.ConstantScale(0.5), ops.Identity(), ops.Reshape((2, -1)))
    assert_same(grads_of(lambda: block(x), [x], dy), grads_of(lambda: (x * 0.5).reshape(2, 12), [x], dy))
    with pytest.raises(ValueError, match="cannot be reshaped to .5, -1."):
        ops.Reshape((5, -1))(x)


def test_dropout() -> None:
    op, x = ops.Dropout(0.25), torch.ones(100, 100, requires_grad=True)
    y, dx = grads_of(lambda: op(x), [x], torch.ones(100, 100))
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert torch.equal(y, dx), "the gradient passes where the value does"
    # 10000 draws: the share of zeros is within 5 standard deviations of 0.0043 each.
    assert abs((y == 0).float().mean().item() - 0.25) < 0.022
    assert torch.equal(op.eval()(x), x)
    assert torch.equal(ops.Dropout(0.0)(x), x)
    with pytest.raises(ValueError, match="a probability below 1"):
        ops.Dropout(1.0)
