"""Rows of a weight go to the tensors that Hugging Face's files have for them."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.export import contents
from crossgrain.export.hub_names import Piece, hub_names

from .models import mlp, read


def experts(recipe: str | None = "mxfp4") -> nn.Module:
    model = nn.Sequential(cg.GroupedLinear(2, 64, 32, bias=False, single_grouped_weight=True), nn.LayerNorm(64))
    if recipe is not None:
        cg.convert(model, recipe)
    return model


PIECES = {
    "0.weight": [
        Piece(f"experts.{g}.{name}.weight", g, start, start + 16)
        for name, start in (("w1", 0), ("w3", 16))
        for g in range(2)
    ],
    "1.weight": [Piece("norm.weight", None, 0, 64)],
}


def test_a_stack_is_taken_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "hub_names", lambda model: PIECES)
    model = experts()
    report = cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert sorted(report.quantized) == sorted(piece.name for piece in PIECES["0.weight"])
    stored = read(tmp_path / "out")
    for g, weight in enumerate(model[0].weight.detach()):
        whole = cg.quantize(weight, "mxfp4").plane(cg.ROWWISE)
        codes = torch.cat([stored[f"experts.{g}.{name}.weight_packed"] for name in ("w1", "w3")])
        scales = torch.cat([stored[f"experts.{g}.{name}.weight_scale"] for name in ("w1", "w3")])
        assert torch.equal(codes, whole.operand_codes()) and torch.equal(scales, whole.operand_scales())
    assert torch.equal(stored["norm.weight"], model[1].weight) and "1.bias" in stored
    for keep_quantized in (True, False):
        other = experts()
        cg.load_exported(other, tmp_path / "out", keep_quantized=keep_quantized)
        again = cg.export(other, tmp_path / f"again-{keep_quantized}", format="compressed-tensors")
        assert again.quantized == report.quantized
        mine = read(tmp_path / f"again-{keep_quantized}")
        assert all(torch.equal(mine[name], stored[name]) for name in stored)


def test_a_stack_in_high_precision_is_taken_apart_too(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "hub_names", lambda model: PIECES)
    model = nn.Sequential(*experts(None), nn.Linear(64, 64))
    cg.convert(model, "mxfp8; 0: hp")
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    stored = read(tmp_path / "out")
    for piece in PIECES["0.weight"]:
        assert torch.equal(stored[piece.name], model[0].weight[piece.place, piece.start : piece.stop])
    other = nn.Sequential(*experts(None), nn.Linear(64, 64))
    cg.convert(other, "mxfp8; 0: hp")
    cg.load_exported(other, tmp_path / "out")
    assert torch.equal(other[0].weight, model[0].weight)


def test_other_models_keep_their_names():
    assert hub_names(mlp()) == {}


def test_adapters_are_refused(tmp_path):
    adapter = type("LoraLayer", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})
    model = nn.ModuleDict({"layer": mlp("mxfp8"), "adapter": adapter()})
    with pytest.raises(ValueError, match="adapter has adapters of peft, .*: merge them first"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")
