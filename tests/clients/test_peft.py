"""LoRA of peft over converted models: the base is quantized once and frozen, adapters stay in high precision."""

import copy

import pytest
import torch

import crossgrain as cg
from crossgrain.convert.layers import ConvertedLinear

from ..common.tiny_models import tiny_llama

peft = pytest.importorskip("peft", reason="peft is not installed: make test-clients")

TOKENS = torch.arange(32).view(2, 16) % 64
CONFIG = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def adapted(order: str, recipe: str = "nvfp4"):
    torch.manual_seed(0)
    model = tiny_llama()
    if order == "convert first":
        cg.convert(model, recipe)
    model = peft.get_peft_model(model, copy.deepcopy(CONFIG))
    if order == "peft first":
        report = cg.convert(model, recipe)
        adapters = [path for path in report.left if "lora" in path]
        assert len(adapters) == 2 * 6 and all(
            "adapters stay in high precision" in report.left[path] for path in adapters
        )
        assert "lm_head" in " ".join(report.left)
    return model


@pytest.mark.parametrize("order", ["peft first", "convert first"])
def test_only_adapters_train(order):
    model = adapted(order)
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    assert isinstance(base, ConvertedLinear) and not base.weight.requires_grad
    before = base.weight.detach().clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and torch.equal(base.weight, before)
    assert base._weight_cache.unchanged.copies  # quantized once, and used in every step


def test_both_orders_compute_the_same():
    results = []
    for order in ("peft first", "convert first"):
        model = adapted(order)
        torch.manual_seed(1)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_adapters_become_quantized_if_they_are_asked_for():
    model = peft.get_peft_model(tiny_llama(), copy.deepcopy(CONFIG))
    report = cg.convert(model, "mxfp8", include="*lora_?.default")
    assert not [path for path in report.left if "lora" in path]


@torch.no_grad()
def test_merging_is_seen_and_unmerging_gives_the_base_back():
    """Merging writes through ``weight.data``, which version counters do not see."""
    model = adapted("peft first", "mxfp8").eval()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 32)
    alone = layer.base_layer(x)
    model.merge_adapter()
    merged = layer.base_layer(x)
    with cg.settings.override(reuse_unchanged_weights=False):
        assert torch.equal(layer.base_layer(x), merged)
    assert not torch.equal(merged, alone)
    model.unmerge_adapter()
    torch.testing.assert_close(layer.base_layer(x), alone, rtol=0.1, atol=0.1)  # a weight on an edge may flip
    plain = model.merge_and_unload()
    assert isinstance(plain.model.layers[0].self_attn.q_proj, ConvertedLinear)
    assert plain(input_ids=TOKENS).logits.isfinite().all()


def test_adapters_are_saved_and_loaded(tmp_path):
    model = adapted("peft first").eval()
    torch.manual_seed(0)
    base = tiny_llama()
    model.save_pretrained(tmp_path)
    cg.convert(base, "nvfp4")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_adapters_over_fused_experts():
    """peft reaches parameters that are not of a layer by a parametrization, which adds its product to them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    model = transformers.MixtralForCausalLM(config)
    cg.convert(model, "mxfp8")
    model = peft.get_peft_model(model, lora)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
