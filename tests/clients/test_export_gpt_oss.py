"""transformers reads experts that we export in the layout of gpt-oss, and decodes them to our numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossgrain as cg

from ..export.models import read

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")

from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

NAMES = {
    "model.layers.0.mlp.experts.gate_up_proj.weight": "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.down_proj.weight": "model.layers.0.mlp.experts.down_proj",
}


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


def with_our_experts(model: nn.Module) -> nn.Module:
    """The same parameters in a model whose experts are crossgrain's, [experts, out, in], to export them."""
    experts = model.model.layers[0].mlp.experts
    ours = nn.Module()
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, name).detach().transpose(1, 2)
        layer = cg.GroupedLinear(
            *stack.shape[:1],
            stack.shape[2],
            stack.shape[1],
            bias=False,
            single_grouped_weight=True,
            params_dtype=stack.dtype,
        )
        layer.weight.data.copy_(stack)
        setattr(ours, name, layer)
        ours.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias"))
    model.model.layers[0].mlp.experts = ours
    return model


def test_transformers_decodes_to_our_numbers(tmp_path):
    torch.manual_seed(0)
    model = with_our_experts(tiny_gpt_oss().to(torch.bfloat16))
    report = cg.convert(model, "mxfp4", skip=nn.Linear)
    assert len(report.bound) == 2
    cg.export(model, tmp_path / "out", format="gpt-oss", rename=NAMES)
    stored = read(tmp_path / "out")
    experts = model.model.layers[0].mlp.experts
    expected = {}
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        found = convert_moe_packed_tensors(stored[f"{key}_blocks"], stored[f"{key}_scales"])
        weights = [cg.quantize(weight, "mxfp4") for weight in getattr(experts, name).weight.detach()]
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
