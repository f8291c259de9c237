"""Exports have the names of Hugging Face's files, also where transformers has other parameters in memory."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import crossgrain as cg

from ..export.models import read

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: make test-clients")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
}


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=3))
    else:
        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=32)
        model = transformers.Qwen3MoeForCausalLM(config)
    return model.to(torch.bfloat16).eval()


EXPERTS = [("mixtral", "block_sparse_moe.experts.2.w3"), ("qwen3", "mlp.experts.2.up_proj")]


@pytest.mark.parametrize("kind, expert", EXPERTS)
def test_experts_have_the_names_of_files(kind, expert, tmp_path):
    model = model_of(kind)
    model.save_pretrained(tmp_path / "hub")
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    cg.convert(model, "mxfp8; lm_head: hp", skip=lambda path, _: "experts" in path)
    report = cg.export(model, tmp_path / "out", format="compressed-tensors")
    stored = read(tmp_path / "out")
    assert {name.removesuffix("_scale") for name in stored} == hub.keys()
    assert all(torch.equal(stored[name], hub[name]) for name in hub if name not in report.quantized)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert f"model.layers.1.{expert}" in ignored and "model.layers.1.mlp.experts" in ignored
    assert any(name.endswith("gate") for name in ignored)  # the router

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    for name, parameter in loaded.named_parameters():
        if name not in report.quantized and not name.endswith("weight_scale"):
            assert torch.equal(parameter, model.get_parameter(name)), name
    other = model_of(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    cg.convert(other, "mxfp8; lm_head: hp", skip=lambda path, _: "experts" in path)
    cg.load_exported(other, tmp_path / "out")
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.equal(other(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("fmt", ["nvfp4-plain", "mxfp4"])
def test_converted_experts_have_the_names_and_bytes_of_files(tmp_path, fmt):
    """Mixtral's files have w1, w3 and w2 of each expert; in memory, w1 and w3 of all experts are one parameter."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    model = transformers.MixtralForCausalLM(config)
    cg.convert(model, fmt)
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    stored = read(tmp_path / "out")
    experts = model.model.layers[0].mlp.experts
    for g in range(2):
        names = [name for name in stored if f"experts.{g}." in name and name.endswith("weight_packed")]
        assert len(names) == 3, names
        both = cg.quantize(experts.gate_up_proj[g].detach(), fmt.removesuffix("-plain")).plane(cg.ROWWISE)
        up = [stored[name] for name in sorted(names) if "w2" not in name and "down" not in name]
        assert torch.equal(torch.cat(up), both.operand_codes())
    other = transformers.MixtralForCausalLM(config)
    cg.convert(other, fmt)
    cg.load_exported(other, tmp_path / "out", keep_quantized=False)
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        if fmt == "mxfp4":  # decoded NVFP4 may be quantized to other bytes, because its amax is rounded
            assert torch.equal(other(tokens).logits, model(tokens).logits)
        else:
            torch.testing.assert_close(other(tokens).logits, model(tokens).logits, rtol=0.05, atol=0.05)
