"""What we export in the layout of ModelOpt has the names, dtypes and shapes of what nvidia-modelopt writes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import crossgrain as cg

from ..common.tiny_models import tiny_llama
from ..export.models import read

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
if find_spec("modelopt") is None:
    pytest.skip("nvidia-modelopt is not installed: make test-clients", allow_module_level=True)

# ModelOpt changes classes of other libraries when it is imported, so it runs in a process of its own.
THEIRS = """
import sys
import torch
import transformers
import modelopt.torch.quantization as quantization
from modelopt.torch.export import export_hf_checkpoint

source, target, algorithm = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
tokens = torch.arange(32).view(2, 16)
quantization.quantize(model, getattr(quantization, f"{algorithm}_DEFAULT_CFG"), lambda m: m(input_ids=tokens))
export_hf_checkpoint(model, export_dir=target)
"""


def run_modelopt(source: Path, target: Path, algorithm: str) -> None:
    command = [sys.executable, "-c", THEIRS, str(source), str(target), algorithm]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]


def described(directory) -> tuple[dict, dict]:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    about = json.loads((directory / "hf_quant_config.json").read_text())
    return config, about["quantization"]


@pytest.mark.parametrize("algorithm, recipe", [("NVFP4", "fprop: nvfp4, dgrad: hp, wgrad: hp"), ("FP8", "fp8")])
def test_both_write_the_same_layout(algorithm, recipe, tmp_path):
    torch.manual_seed(0)
    model = tiny_llama(hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    tokens = torch.arange(32).view(2, 16)
    model.save_pretrained(tmp_path / "source")
    run_modelopt(tmp_path / "source", tmp_path / "theirs", algorithm)
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
