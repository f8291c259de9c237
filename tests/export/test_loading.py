"""Exports load into parameters that are kept quantized, byte for byte; what does not fit changes nothing."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.export.walk import quantized_weights

from ..common.logs import warned
from ..common.saved_models import assert_same_contents
from .models import ONLY_FORWARD, bytes_of, mlp

CASES = {
    "compressed-tensors": [
        "nvfp4",
        ONLY_FORWARD.format("nvfp4(4over6)"),
        "mxfp4",
        "mxfp8",
        "fp8",
        "fp8-delayed",
        "fp8-block",
        "fprop: nvfp4, dgrad: mxfp8, wgrad: mxfp8",
        "mxfp8; 3: nvfp4",
    ],
    "modelopt": ["nvfp4", ONLY_FORWARD.format("nvfp4"), "fp8"],
}
EVERY_CASE = [(format, recipe) for format, recipes in CASES.items() for recipe in recipes]


def rows_of(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for weight in quantized_weights(model, None):
        read = weight.read()
        found += [read.codes, read.scales, *([] if read.amax is None else [read.amax])]
    return found


@pytest.mark.parametrize("format, recipe", EVERY_CASE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_come_back_byte_for_byte_and_train(format, recipe, dtype, tmp_path):
    model, x = mlp(recipe, dtype=dtype), torch.randn(32, 64, dtype=dtype)
    cg.export(model, tmp_path / "out", format=format, inputs=[x] if format == "modelopt" else None)
    other = mlp(recipe, dtype=dtype)
    loaded = cg.load_exported(other, tmp_path / "out")
    assert loaded == ["0.weight", "3.weight"]
    assert all(isinstance(other[i].weight, cg.QuantizedTensor) and other[i].weight.dtype == dtype for i in (0, 3))
    assert all(map(torch.equal, rows_of(other), rows_of(model)))
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    optimizer = cg.optim.FusedAdam(other.parameters(), lr=1e-2, master_weights=True)
    before = rows_of(other)
    other(x).square().mean().backward()
    optimizer.step()
    assert not all(map(torch.equal, rows_of(other), before))


def test_columns_are_the_transposed_rows_where_that_is_exact(tmp_path):
    model, other = mlp("nvfp4"), mlp("nvfp4")
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    cg.load_exported(other, tmp_path / "out")
    weight = other[0].weight
    assert torch.equal(weight.dequantize(direction=cg.ROWWISE), weight.dequantize(direction=cg.COLUMNWISE))
    assert torch.equal(weight.plane(cg.ROWWISE).amax, weight.plane(cg.COLUMNWISE).amax)


@pytest.mark.parametrize(
    "backward, quantizer",
    [("mxfp8", lambda: cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)), ("nvfp4", cg.NVFP4Quantizer)],
)
def test_other_columns_are_made_from_the_decoded_rows(backward, quantizer, tmp_path):
    recipe = f"fprop: nvfp4, dgrad: {backward}, wgrad: {backward}"
    model, other = mlp(recipe, dtype=torch.bfloat16), mlp(recipe, dtype=torch.bfloat16)
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    cg.load_exported(other, tmp_path / "out")
    weight = other[0].weight
    rows = weight.dequantize(dtype=torch.float32, direction=cg.ROWWISE)  # not rounded to bfloat16 in between
    expected = quantizer()(rows.detach()).dequantize(direction=cg.COLUMNWISE)
    assert torch.equal(weight.dequantize(dtype=torch.float32, direction=cg.COLUMNWISE), expected)


def test_parameters_that_are_kept_already_stay_the_same_objects(tmp_path):
    def kept() -> nn.Module:
        with cg.quantized_model_init(recipe="nvfp4"):
            model = nn.Sequential(cg.Linear(64, 32), cg.Linear(32, 64))
        cg.convert(model, "nvfp4")
        return model

    model, other = kept(), kept()
    cg.export(model, tmp_path / "out", format="modelopt")
    parameters = list(other.parameters())
    cg.load_exported(other, tmp_path / "out")
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))
    assert_same_contents(bytes_of(other), bytes_of(model))


@pytest.mark.parametrize("stacked", [False, True])
def test_groups_load_again(stacked, tmp_path):
    def experts(kept: bool) -> nn.Module:
        with cg.quantized_model_init(enabled=kept, recipe="mxfp8"):
            layer = cg.GroupedLinear(3, 64, 32, single_grouped_weight=stacked, single_grouped_bias=stacked)
        model = nn.Sequential(layer)
        cg.convert(model, "mxfp8")
        return model

    model = experts(False)
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    for kept in (True, False):
        other = experts(kept)
        cg.load_exported(other, tmp_path / "out")
        assert all(map(torch.equal, rows_of(other), rows_of(model)))
        for name, bias in other.named_parameters():
            if "bias" in name:
                assert torch.equal(bias, model.get_parameter(name))


def test_a_stack_with_different_scales_can_only_be_decoded(tmp_path):
    def experts() -> nn.Module:
        model = nn.Sequential(cg.GroupedLinear(2, 64, 32, single_grouped_weight=True))
        cg.convert(model, "nvfp4")
        return model

    model, other = experts(), experts()
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    before = bytes_of(other)
    with pytest.raises(ValueError, match="0.0.weight: the weights of this stack have scales of their own"):
        cg.load_exported(other, tmp_path / "out")
    assert_same_contents(bytes_of(other), before)
    cg.load_exported(other, tmp_path / "out", keep_quantized=False)
    expected = [cg.NVFP4Quantizer(with_2d_quantization=True)(w).dequantize() for w in model[0].weight.detach()]
    assert torch.equal(other[0].weight, torch.stack(expected))


def test_decoded_weights_keep_the_parameters(tmp_path):
    model, other = mlp("mxfp8"), mlp("mxfp8")
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    parameter = other[0].weight
    cg.load_exported(other, tmp_path / "out", keep_quantized=False)
    assert other[0].weight is parameter and not isinstance(parameter, cg.QuantizedTensor)
    assert torch.equal(parameter, cg.quantize(model[0].weight.detach(), "mxfp8").dequantize(direction=cg.ROWWISE))
    low = mlp("nvfp4", dtype=torch.bfloat16)
    cg.export(mlp("nvfp4"), tmp_path / "nvfp4", format="compressed-tensors")
    with warned("tensors of .* do not fit exactly into the dtypes of this model"):
        cg.load_exported(low, tmp_path / "nvfp4", keep_quantized=False)


def test_plain_exports_load_too(tmp_path):
    model, other = mlp("nvfp4"), mlp("nvfp4")
    cg.export(model, tmp_path / "out", format="plain", dtype=torch.float32)
    assert cg.load_exported(other, tmp_path / "out") == []
    assert_same_contents(bytes_of(other), bytes_of(model))


def refused(other: nn.Module, directory, match: str, error=ValueError, **options) -> None:
    before = bytes_of(other)
    with pytest.raises(error, match=match):
        cg.load_exported(other, directory, **options)
    assert_same_contents(bytes_of(other), before)


def test_a_model_that_does_not_fit_is_unchanged(tmp_path):
    out = tmp_path / "out"
    cg.export(mlp("nvfp4"), out, format="compressed-tensors")
    refused(mlp("mxfp4"), out, "0.weight_scale has dtype torch.float8_e4m3fn and shape .*, but this model needs")
    refused(mlp("mxfp8"), out, "has no tensor 0.weight, which this model needs")
    refused(mlp("nvfp4; 3: hp"), out, "has no tensor 3.weight")
    refused(mlp("nvfp4", hidden=64), out, r"0.weight .*: it is \[128, 64\] in the file, but \[64, 64\] in this model")
    refused(mlp(), out, "has no tensor 0.weight")
    refused(nn.Sequential(*mlp("nvfp4")[:3]), out, "holds tensors that this model has no place for: 3.weight_global")
    refused(mlp("nvfp4"), tmp_path, "holds no model", FileNotFoundError)
    cg.export(mlp("mxfp8; 3: hp"), tmp_path / "half", format="compressed-tensors")
    refused(mlp("nvfp4"), tmp_path / "half", "0.weight is not quantized in .*, or in another format")


def test_scales_of_rows_are_not_scales_of_tiles(tmp_path):
    cg.export(mlp(ONLY_FORWARD.format("nvfp4")), tmp_path / "out", format="compressed-tensors")
    refused(mlp("nvfp4"), tmp_path / "out", "0.weight: the model wants nvfp4_2d, with one scale for 16 rows")


def test_padded_and_split_weights_cannot_be_kept(tmp_path):
    model = mlp("nvfp4; 3: hp", hidden=40)
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    other = mlp("nvfp4; 3: hp", hidden=40)
    refused(other, tmp_path / "out", r"pad the weight \[40, 64\] to \[48, 64\], so it cannot be kept quantized")
    cg.load_exported(other, tmp_path / "out", keep_quantized=False)

    def split() -> nn.Module:
        model = nn.Sequential(cg.Linear(64, 64, parameters_split=("query", "key")))
        cg.convert(model, "mxfp8")
        return model

    model, other = split(), split()
    cg.export(model, tmp_path / "split", format="compressed-tensors")
    refused(other, tmp_path / "split", "a weight of several parameters cannot be kept quantized")
    cg.load_exported(other, tmp_path / "split", keep_quantized=False)
    whole = cg.quantize(torch.cat([model[0].query_weight, model[0].key_weight]).detach(), "mxfp8")
    assert torch.equal(torch.cat([other[0].query_weight, other[0].key_weight]), whole.dequantize(direction=cg.ROWWISE))


def test_a_failure_at_the_end_restores_the_model(tmp_path, monkeypatch):
    model, other = mlp("mxfp8"), mlp("mxfp8")
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    weights = [other[0].weight, other[3].weight]
    monkeypatch.setattr(cg.Linear, "clear_weight_cache", lambda self: (_ for _ in ()).throw(RuntimeError("no")))
    refused(other, tmp_path / "out", "no", RuntimeError)
    assert other[0].weight is weights[0] and other[3].weight is weights[1]


def test_a_recipe_of_an_autocast_is_given(tmp_path):
    model, other = nn.Sequential(cg.Linear(64, 32)), nn.Sequential(cg.Linear(64, 32))
    cg.export(model, tmp_path / "out", format="compressed-tensors", recipe="mxfp8")
    cg.load_exported(other, tmp_path / "out", recipe="mxfp8")
    assert isinstance(other[0].weight, cg.MXFP8Tensor)


@pytest.mark.parametrize("make", [lambda: cg.ops.Linear(64, 32), lambda: cg.LayerNormMLP(64, 128)])
def test_operations_and_mlps_load_again(make, tmp_path):
    models = []
    for _ in range(2):
        models.append(nn.Sequential(make()))
        cg.convert(models[-1], "mxfp8")
    model, other = models
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    cg.load_exported(other, tmp_path / "out")
    assert all(map(torch.equal, rows_of(other), rows_of(model)))
    assert any(isinstance(parameter, cg.QuantizedTensor) for parameter in other.parameters())
    x = torch.randn(32, 64)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    other(x).sum().backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
