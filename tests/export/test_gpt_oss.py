"""The layout of gpt-oss: stacks of experts in MXFP4."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import crossgrain as cg

from . import decoder
from .models import mlp, read


@pytest.mark.parametrize("kept", [False, True])
def test_a_stack_decodes_to_its_experts(kept, tmp_path):
    with cg.quantized_model_init(enabled=kept, recipe="mxfp4"):
        layer = cg.GroupedLinear(3, 64, 32, single_grouped_weight=True, single_grouped_bias=True)
    model = nn.ModuleDict({"experts": layer, "router": nn.Linear(64, 3)})
    cg.convert(model, "mxfp4; router: hp")
    cg.export(model, tmp_path / "out", format="gpt-oss", rename={"experts.weight": "experts.up_proj"})
    stored = read(tmp_path / "out")
    assert stored["experts.up_proj_blocks"].shape == (3, 32, 2, 16)
    decoded = decoder.gpt_oss(stored, "experts.up_proj")
    for g, weight in enumerate(layer._group_weights()):
        own = weight if kept else cg.quantize(weight, "mxfp4")
        assert np.array_equal(decoded[g], own.dequantize(dtype=torch.float32, direction=cg.ROWWISE).detach().numpy())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "mxfp4", "modules_to_not_convert": ["router"]}

    with cg.quantized_model_init(recipe="mxfp4"):
        other = cg.GroupedLinear(3, 64, 32, single_grouped_weight=True, single_grouped_bias=True)
    other = nn.ModuleDict({"experts": other, "router": nn.Linear(64, 3)})
    cg.convert(other, "mxfp4; router: hp")
    cg.load_exported(other, tmp_path / "out", rename={"experts.weight": "experts.up_proj"})
    found = other["experts"].weight.dequantize(dtype=torch.float32, direction=cg.ROWWISE).detach()
    assert np.array_equal(found.numpy(), decoded)


def test_layers_of_their_own_are_refused(tmp_path):
    with pytest.raises(ValueError, match="0.weight: gpt-oss stores only stacks of experts quantized"):
        cg.export(mlp("mxfp4"), tmp_path / "out", format="gpt-oss")
    with pytest.raises(ValueError, match="it is mxfp8 in fprop, and gpt-oss holds mxfp4"):
        cg.export(mlp("mxfp8"), tmp_path / "out", format="gpt-oss")
    assert not list(tmp_path.iterdir())
