"""Quantization-aware training: forward multiplies the weight that is exported, and gradients pass straight through."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.linear import function
from crossgrain.planes import ROWWISE

WEIGHTS, BOTH = ["mxfp4-qat-weights", "nvfp4-qat-weights"], ["mxfp4-qat", "nvfp4-qat"]


@pytest.fixture(params=[*WEIGHTS, *BOTH])
def preset(request) -> str:
    return request.param


def converted(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    cg.convert(model, recipe)
    return model


def test_forward_multiplies_the_plane_that_is_exported(preset: str, monkeypatch) -> None:
    """The rows of the weight have the bytes that its quantizer makes of it once, and those of the plain format."""
    model = converted(preset)
    made = []

    def spied(*args, real=function.weight_operands):
        result = real(*args)
        made.append(result[0])
        return result

    monkeypatch.setattr(function, "weight_operands", spied)
    model(torch.randn(32, 64)).sum().backward()
    (multiplied,) = made
    weight = model[0].weight.detach()
    own = cg.GemmRecipe.load(preset).qfactory(cg.QuantizerRole("linear", "weight", "0"))(weight)
    for once in (own, cg.quantize(weight, preset.partition("-")[0], columnwise=False)):
        plane = once.plane(ROWWISE)
        assert multiplied.format == plane.format and torch.equal(multiplied.data, plane.data)
        assert torch.equal(multiplied.scale, plane.scale)
        assert plane.amax is None or torch.equal(multiplied.amax, plane.amax)


def test_gradients_pass_straight_through(preset: str) -> None:
    """dx = dy · Q(W), and dW = dyᵀ · x, with Q(x) if the input is quantized."""
    model = converted(preset)
    x = torch.randn(32, 64, requires_grad=True)
    y = model(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    name = preset.partition("-")[0]
    weight, rounded = (cg.quantize(t.detach(), name, columnwise=False).dequantize() for t in (model[0].weight, x))
    used = x.detach() if preset in WEIGHTS else rounded
    # The scale of an NVFP4 tensor multiplies the sum, not each number: another order of roundings in fp32.
    torch.testing.assert_close(y, used @ weight.t(), rtol=1e-5, atol=1e-5)
    assert torch.equal(x.grad, dy @ weight)
    assert torch.equal(model[0].weight.grad, dy.t() @ used)


def test_only_the_rows_are_kept_for_backward() -> None:
    model, x = converted("mxfp4-qat"), torch.randn(32, 64)
    kept: dict[int, int] = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = model(x.requires_grad_())
    del y
    codes = (32 * 64 + 48 * 64) // 2
    assert codes < sum(kept.values()) < 4 * 48 * 64  # less than the decoded weight alone


def test_weights_of_experts_alone() -> None:
    line = "hp, allow_mixed: true; 0: fprop.weight: mxfp4, weight.source: dequantized_late"
    x = torch.randn(32, 64)
    assert torch.equal(converted(line)(x), converted("mxfp4-qat-weights")(x))
