"""What we export in the layout of ModelOpt has the names, dtypes and shapes of what nvidia-modelopt writes."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import crossgrain as cg

from ..common.tiny_models import tiny_llama
from ..export.models import read

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
quantization = pytest.importorskip("modelopt.torch.quantization", reason="nvidia-modelopt is not installed")


def described(directory) -> tuple[dict, dict]:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    about = json.loads((directory / "hf_quant_config.json").read_text())
    return config, about["quantization"]


@pytest.mark.parametrize("algorithm, recipe", [("NVFP4", "fprop: nvfp4, dgrad: hp, wgrad: hp"), ("FP8", "fp8")])
def test_both_write_the_same_layout(algorithm, recipe, tmp_path):
    from modelopt.torch.export import export_hf_checkpoint

    torch.manual_seed(0)
    model = tiny_llama(hidden_size=64, intermediate_size=128, architectures=["LlamaForCausalLM"]).to(torch.bfloat16)
    tokens = torch.arange(32).view(2, 16)
    theirs = copy.deepcopy(model)
    quantization.quantize(theirs, getattr(quantization, f"{algorithm}_DEFAULT_CFG"), lambda m: m(input_ids=tokens))
    export_hf_checkpoint(theirs, export_dir=tmp_path / "theirs")
    cg.convert(model, f"{recipe}; lm_head: hp")
    cg.export(model, tmp_path / "ours", format="modelopt", inputs=[{"input_ids": tokens}])
    mine, other = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert mine.keys() == other.keys()
    for name in mine:
        assert (mine[name].dtype, mine[name].shape) == (other[name].dtype, other[name].shape), name
        if name.endswith("input_scale"):
            # Their model has quantized layers before this one while it observes; the first layer's input is the same.
            torch.testing.assert_close(mine[name], other[name], rtol=0.05, atol=0)
    (my_config, my_about), (their_config, their_about) = described(tmp_path / "ours"), described(tmp_path / "theirs")
    for found, expected in ((my_config, their_config), (my_about, their_about)):
        for entry in ("ignore", "exclude_modules"):
            assert sorted(found.pop(entry, [])) == sorted(expected.pop(entry, []))
        found.pop("producer", None), expected.pop("producer", None)
        assert found == expected
    if algorithm == "NVFP4":
        # They give q, k, v and gate, up one global scale; other layers have scales of their own, as ours.
        for layer in ("self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.0.{layer}.weight"
            assert torch.equal(mine[f"{name}_scale_2"], other[f"{name}_scale_2"])
            assert torch.equal(mine[f"{name}_scale"].view(torch.uint8), other[f"{name}_scale"].view(torch.uint8))
            # They divide in bfloat16, so numbers near the middle between two codes may go the other way.
            assert (mine[name] != other[name]).float().mean() < 0.01
