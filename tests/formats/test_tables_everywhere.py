"""MXINT8 and HiFloat8 in all that formats are for. The suites over all quantizers have them too."""

import copy

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.files.safetensors_file import load_safetensors, save_safetensors
from crossgrain.gemm.operands import check_operands

from ..common.quantizers import assert_same_bytes

NAMES = pytest.mark.parametrize("name", ["mxint8", "hifloat8"])


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize_decodes_to_about_the_same_in_both_directions(name, dtype):
    x = torch.randn(64, 96).to(dtype)
    q = cg.quantize(x, name)
    assert isinstance(q, cg.FormatTensor) and q.dtype == dtype
    for direction in cg.Direction:
        error = (q.dequantize(direction=direction).float() - x.float()).norm() / x.float().norm()
        assert error < {"mxint8": 0.012, "hifloat8": 0.03}[name]
    with cg.kernels.choice.using_backend("reference"):
        assert_same_bytes(cg.quantize(x, name), q)


@NAMES
def test_a_linear_layer_multiplies_what_the_planes_decode_to(name):
    layer = cg.Linear(64, 96, bias=False)
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 96)
    with cg.autocast(recipe=f"all: {name}"):
        y = layer(x)
    y.backward(dy)
    row, column = cg.ROWWISE, cg.COLUMNWISE
    qx, qw, qdy = (cg.quantize(t.detach(), name) for t in (x, layer.weight, dy))

    def product(a, b):
        return a.double() @ b.double()

    # Of float32 sums; the operands are exact.
    for got, wanted in (
        (y, product(qx.dequantize(direction=row), qw.dequantize(direction=row).t())),
        (x.grad, product(qdy.dequantize(direction=row), qw.dequantize(direction=column))),
        (layer.weight.grad, product(qdy.dequantize(direction=column).t(), qx.dequantize(direction=column))),
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "recipe",
    [
        "fprop: mxint8, dgrad: mxint8(sr), wgrad: mxint8(sr)",
        "fprop: hifloat8, dgrad: hifloat8, wgrad: hifloat8(sr)",
        "fprop: mxint8, dgrad: mxfp8, wgrad: hifloat8",
        "fprop: nvfp4, dgrad: hifloat8, wgrad: mxint8, weight.source: dequantized",
    ],
)
def test_converted_models_train(recipe):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    cg.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target, losses = torch.randn(64, 64), torch.randn(64, 32), []
    for _ in range(8):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(map(torch.isfinite, map(torch.tensor, losses)))


@NAMES
def test_quantized_weights_are_saved_and_trained(name, tmp_path):
    with cg.quantized_model_init(recipe=f"all: {name}"):
        model = nn.Sequential(cg.Linear(64, 64), cg.Linear(64, 32))
    assert isinstance(model[0].weight, cg.FormatTensor)
    optimizer = cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    with cg.autocast(recipe=f"all: {name}"):
        model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    save_safetensors(model, tmp_path / "model.safetensors")
    again = copy.deepcopy(model)
    with torch.no_grad():
        again[0].weight.zero_()
    load_safetensors(tmp_path / "model.safetensors", again)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    for i in (0, 1):
        assert_same_bytes(again[i].weight, model[i].weight)
        assert_same_bytes(loaded[f"{i}.weight"], model[i].weight)


@pytest.mark.parametrize("others", ["mxfp8", "mxfp4", "fp8", "nvfp4", "identity"])
@NAMES
def test_they_are_multiplied_with_their_own_kind_only(name, others):
    mine, other = cg.get_format(name), cg.get_format(others)
    operands = [("input", cg.ROWWISE, mine), ("weight", cg.ROWWISE, other)]
    with pytest.raises(
        ValueError, match=rf"fprop multiplies input rowwise \({name}\).*scaled alike.*(int8|hifloat8) with"
    ):
        check_operands("fprop", operands)
    check_operands("fprop", [operands[0], ("weight", cg.ROWWISE, mine)])
    with pytest.raises(ValueError, match="scaled alike"):
        cg.convert(nn.Linear(64, 64), f"all: {name}, fprop.weight: {'hp' if others == 'identity' else others}")
