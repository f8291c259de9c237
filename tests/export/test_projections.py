"""Fused experts are exported expert by expert; what engines have no quantized layer for is refused."""

import pytest
import torch
from torch import nn

import crossgrain as cg

from ..common.experts import Experts, routed
from .models import read

EXPERTS = {"experts": 3, "hidden": 64, "width": 32}


def experts(recipe: str = "nvfp4-plain", **options) -> nn.Module:
    model = nn.ModuleDict({"experts": Experts(**EXPERTS, **options)})
    cg.convert(model, recipe)
    return model


@pytest.mark.parametrize("transposed", [False, True])
def test_every_expert_has_the_bytes_that_fprop_multiplies(tmp_path, transposed):
    model = experts(transposed=transposed, bias=True)
    report = cg.export(model, tmp_path / "out", format="compressed-tensors")
    stored = read(tmp_path / "out")
    assert len(report.quantized) == 6
    for name in ("gate_up_proj", "down_proj"):
        for g, weight in enumerate(getattr(model["experts"], name).detach()):
            plane = cg.quantize(weight.t() if transposed else weight, "nvfp4").plane(cg.ROWWISE)
            assert torch.equal(stored[f"experts.{name}.{g}.weight_packed"], plane.operand_codes())
    assert torch.equal(stored["experts.down_proj_bias"], model["experts"].down_proj_bias)


@pytest.mark.parametrize("keep_quantized", [True, False])
def test_they_are_loaded_again(tmp_path, keep_quantized):
    model, other = experts("mxfp4"), experts("mxfp4")
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    cg.load_exported(other, tmp_path / "out", keep_quantized=keep_quantized)
    arguments = (torch.randn(6, 64), *routed(6, 3))
    with torch.no_grad():
        assert torch.equal(other["experts"](*arguments), model["experts"](*arguments))
    if keep_quantized:
        assert isinstance(other["experts"].gate_up_proj, cg.QuantizedTensor)
        y = other["experts"](*arguments)
        y.sum().backward()
        assert other["experts"].down_proj.grad.shape == other["experts"].down_proj.shape


def test_stacks_that_are_stored_transposed_cannot_be_kept_quantized(tmp_path):
    cg.export(experts("mxfp4", transposed=True), tmp_path / "out", format="compressed-tensors")
    with pytest.raises(
        ValueError, match="stored as \\[in, out\\] cannot be kept quantized. Load it with keep_quantized"
    ):
        cg.load_exported(experts("mxfp4", transposed=True), tmp_path / "out")


@pytest.mark.parametrize("module", [nn.Conv2d(3, 32, 4, 4), nn.MultiheadAttention(32, 2)], ids=["Conv2d", "attention"])
def test_what_engines_have_no_layer_for_is_refused(tmp_path, module):
    model, kind = nn.Sequential(module, nn.Linear(32, 32)), type(module).__name__
    cg.convert(model, "mxfp8")
    with pytest.raises(ValueError, match=f"no quantized {kind}. Train with it in high precision: .*skip={kind}"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert not list(tmp_path.iterdir())
