"""transformers reads experts that we export in the layout of gpt-oss, and decodes them to our numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossgrain as cg

from ..export.models import read

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")

from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402


def tiny_gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return transformers.GptOssForCausalLM(config)


def test_transformers_decodes_to_our_numbers(tmp_path):
    torch.manual_seed(0)
    model = tiny_gpt_oss().to(torch.bfloat16)
    for parameter in model.model.layers[0].mlp.experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    report = cg.convert(model, "mxfp4", skip=nn.Linear)
    assert len(report.converted) == 2
    cg.export(model, tmp_path / "out", format="gpt-oss")
    stored = read(tmp_path / "out")
    experts = model.model.layers[0].mlp.experts
    expected = {}
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        found = convert_moe_packed_tensors(stored[f"{key}_blocks"], stored[f"{key}_scales"])
        weights = [cg.quantize(weight.t(), "mxfp4") for weight in getattr(experts, name).detach()]
        # A code times a power of two is exact in bfloat16. They return [experts, in, out].
        expected[key] = torch.stack([w.dequantize(direction=cg.ROWWISE).t() for w in weights])
        assert torch.equal(found, expected[key])

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    parameters = dict(loaded.named_parameters())
    assert all(torch.equal(parameters[key], value) for key, value in expected.items())
    assert torch.equal(
        parameters["model.layers.0.self_attn.q_proj.weight"], model.model.layers[0].self_attn.q_proj.weight
    )
    assert torch.equal(parameters["model.layers.0.mlp.experts.down_proj_bias"], experts.down_proj_bias)
    with torch.no_grad():
        assert loaded(input_ids=torch.arange(8).view(1, 8)).logits.isfinite().all()


def test_training_goes_on_from_a_checkpoint(tmp_path):
    """What was trained is exported, loaded into another model, and quantized to the same bytes again."""
    torch.manual_seed(0)
    model, tokens = tiny_gpt_oss(), torch.arange(16).view(1, 16)
    recipe = "mxfp4, backward_override: dequantized"
    cg.convert(model, recipe, skip=nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    cg.export(model, tmp_path / "out", format="gpt-oss")
    other = tiny_gpt_oss()
    cg.convert(other, recipe, skip=nn.Linear)
    cg.load_exported(other, tmp_path / "out", keep_quantized=False)
    with torch.no_grad():
        assert torch.equal(other(input_ids=tokens).logits, model(input_ids=tokens).logits)
    other(input_ids=tokens, labels=tokens).loss.backward()
    assert other.model.layers[0].mlp.experts.gate_up_proj.grad is not None
