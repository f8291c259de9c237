"""The layout of ModelOpt: names, shapes, dtypes, and scales of inputs."""

import json

import numpy as np
import pytest
import torch

import crossgrain as cg
from crossgrain import kernels

from . import decoder
from .models import ONLY_FORWARD, mlp, multiplied, read


def described(directory):
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    return config, json.loads((directory / "hf_quant_config.json").read_text())["quantization"]


@pytest.mark.parametrize("recipe", ["nvfp4", ONLY_FORWARD.format("nvfp4(4over6)"), "fp8"])
def test_tensors_decode_to_what_fprop_multiplies(recipe, tmp_path, monkeypatch):
    model, x = mlp(recipe), torch.randn(8, 64)
    cg.export(model, tmp_path / "out", format="modelopt", inputs=[x])
    stored = read(tmp_path / "out")
    for name, plane in zip(("0.weight", "3.weight"), multiplied(model, x, monkeypatch), strict=True):
        ours = kernels.decode(plane, torch.float32).numpy()
        # readers multiply by amax / 2688 after rounding it; we by amax and then by 1 / 2688, rounded
        np.testing.assert_allclose(decoder.modelopt(stored, name), ours, rtol=0 if recipe == "fp8" else 2**-21)
        assert stored[f"{name}_scale_2" if recipe != "fp8" else f"{name}_scale"].shape == ()


def test_scales_of_inputs_are_their_largest_magnitudes(tmp_path):
    model = mlp("nvfp4")
    batches = [torch.randn(4, 64), (torch.full((2, 64), -7.0),), {"input": torch.randn(3, 64)}]
    cg.export(model, tmp_path / "out", format="modelopt", inputs=batches)
    stored = read(tmp_path / "out")
    assert stored["0.input_scale"] == torch.tensor(7.0) / 2688 and stored["0.input_scale"].shape == ()
    with cg.autocast(enabled=False), torch.no_grad():
        seen = max(model[:3](batch).abs().max() for batch in (batches[0], batches[1][0], batches[2]["input"]))
    assert stored["3.input_scale"] == seen / 2688
    config, about = described(tmp_path / "out")
    assert config["quant_algo"] == about["quant_algo"] == "NVFP4" and about["group_size"] == 16
    assert "input_activations" in config["config_groups"]["group_0"]


def test_without_inputs_nvfp4_is_weight_only(tmp_path):
    report = cg.export(mlp("nvfp4; 3: hp"), tmp_path / "out", format="modelopt")
    assert "no inputs were observed" in report.notes[0]
    config, about = described(tmp_path / "out")
    assert config["quant_algo"] == about["quant_algo"] == "W4A16_NVFP4"
    assert config["ignore"] == about["exclude_modules"] == ["3"]
    assert not any("input_scale" in name for name in read(tmp_path / "out"))


def test_without_inputs_fp8_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0.weight: modelopt stores a scale for the input of this layer"):
        cg.export(mlp("fp8"), tmp_path / "out", format="modelopt")


def test_delayed_scaling_knows_the_scales_of_inputs(tmp_path):
    model = mlp("fp8-delayed")
    with pytest.raises(ValueError, match="none was observed"):
        cg.export(model, tmp_path / "out", format="modelopt")
    for _ in range(2):
        model(torch.full((16, 64), 3.0)).sum().backward()
    cg.export(model, tmp_path / "out", format="modelopt")
    assert read(tmp_path / "out")["0.input_scale"].item() == pytest.approx(3 / 448, rel=1e-6)


def test_layers_that_no_input_reaches_are_named(tmp_path):
    model = torch.nn.ModuleDict({"used": mlp("nvfp4"), "unused": mlp("nvfp4")})
    model.forward = lambda x: model["used"](x)
    with pytest.raises(ValueError, match="unused.0.weight: no scale .* none of the inputs reached this layer"):
        cg.export(model, tmp_path / "out", format="modelopt", inputs=[torch.randn(2, 64)])
    with pytest.raises(ValueError, match="0.weight: no scale .* its inputs hold NaNs or infinities"):
        cg.export(mlp("nvfp4"), tmp_path / "out", format="modelopt", inputs=[torch.full((2, 64), torch.nan)])
    assert not list(tmp_path.iterdir())
