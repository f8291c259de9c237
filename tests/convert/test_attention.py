"""torch's nn.MultiheadAttention: quantized projections, and everything between them as torch computes it."""

import pytest
import torch
from torch import nn

import crossgrain as cg

from ..common.logs import warned

OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False},
    "other widths": {"kdim": 24, "vdim": 40},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
}


def arguments(options, same: bool, batch: int = 3) -> list[torch.Tensor]:
    query = torch.randn(5, batch, 32)
    if same and "kdim" not in options:
        inputs = [query] * 3
    else:
        inputs = [query, torch.randn(7, batch, options.get("kdim", 32)), torch.randn(7, batch, options.get("vdim", 32))]
    return [x.transpose(0, 1).contiguous() for x in inputs] if options.get("batch_first") and not same else inputs


def masks(kind: str, keys: int, batch: int) -> dict:
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[0, -2:] = True
    return {
        "none": {},
        "no weights": {"need_weights": False},
        "all heads": {"average_attn_weights": False},
        "boolean": {"attn_mask": torch.rand(5, keys) < 0.3},
        "added": {"attn_mask": torch.randn(batch * 2, 5, keys), "need_weights": False},
        "padding": {"key_padding_mask": padding},
        "both": {"key_padding_mask": padding, "attn_mask": torch.triu(torch.ones(5, keys, dtype=torch.bool), 2)},
    }[kind]


@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("kind", ["none", "no weights", "all heads", "boolean", "added", "padding", "both"])
@pytest.mark.parametrize("options", OPTIONS)
def test_in_high_precision_it_computes_what_torch_computes(options, kind, same):
    module = nn.MultiheadAttention(32, 2, **OPTIONS[options])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    inputs = arguments(OPTIONS[options], same)
    batch, keys = (inputs[1].shape[:2]) if OPTIONS[options].get("batch_first") else inputs[1].shape[1::-1]
    if OPTIONS[options].get("batch_first") and same:
        batch, keys = 5, 3
        mask = {} if kind in ("boolean", "added", "padding", "both") else masks(kind, keys, batch)
    else:
        mask = masks(kind, keys, batch)
    expected, weights = module(*inputs, **mask)
    cg.convert(nn.ModuleDict({"attention": module}), "mxfp8")
    with cg.autocast(enabled=False):
        found, found_weights = module(*inputs, **mask)
    torch.testing.assert_close(found, expected)
    assert (weights is None) == (found_weights is None)
    if weights is not None:
        torch.testing.assert_close(found_weights, weights)
    assert not torch.allclose(module(*inputs, **mask)[0], expected, atol=1e-5)


def test_the_causal_hint_and_inputs_without_a_batch():
    module = nn.MultiheadAttention(32, 2).eval()
    x, mask = torch.randn(6, 32), nn.Transformer.generate_square_subsequent_mask(6)
    expected = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    cg.convert(module, "mxfp8")
    with cg.autocast(enabled=False):
        found = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        torch.testing.assert_close(found, expected)
        with pytest.raises(RuntimeError, match="is_causal=True is a hint about attn_mask"):
            module(x, x, x, is_causal=True)


def test_projections_are_those_of_linear_layers():
    module = nn.MultiheadAttention(32, 2)
    weight, bias = module.in_proj_weight.detach().clone(), module.in_proj_bias.detach().clone()
    layer = nn.Linear(32, 96)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias.normal_())
        module.in_proj_bias.copy_(bias)
    recipe = "mxfp8-fwd-nvfp4-bwd, dgrad: nvfp4, wgrad: nvfp4(rht)"
    report = cg.convert(nn.ModuleDict({"self_attn": module}), recipe)
    assert report.converted == ["self_attn.in_proj", "self_attn.out_proj"] and not report.left
    cg.convert(layer, recipe)
    x = torch.randn(4, 2, 32, requires_grad=True)
    y = module._multiply(module._forward_pass(x, None), "in_proj", x)
    assert torch.equal(y, layer(x))
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, module.in_proj_weight, module.in_proj_bias], dy)
    expected = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], dy)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_a_decoder_layer_of_torch_trains_and_has_no_way_around(training):
    layer = nn.TransformerDecoderLayer(32, 2, 64, dropout=0, batch_first=True).train(training)
    report = cg.convert(layer, "nvfp4")
    assert report.quantized_share == 1 and len(report.converted) == 6
    layer(torch.randn(2, 8, 32), torch.randn(2, 5, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_subclass_is_left_with_its_output_projection_and_said():
    class Other(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict({"attention": Other(32, 2), "fc": nn.Linear(32, 32)})
    with warned("80 % of the multiply-adds .* attention.in_proj_weight: a parameter that Other"):
        report = cg.convert(model, "mxfp8")
    assert report.converted == ["fc"]
    assert "reads its weight without calling the layer" in report.left["attention.out_proj"]
    report = cg.convert(model, "mxfp8", skip=["attention.in_proj_weight", "*.out_proj"], strict=True)
    assert report.left["attention.in_proj_weight"] == "skip 'attention.in_proj_weight'"
    assert list(cg.convert(model, "mxfp8", skip=Other, strict=True).left.values()) == ["skip Other"] * 2


def test_masks_of_wrong_shapes_are_refused():
    module = nn.MultiheadAttention(32, 2)
    cg.convert(module, "mxfp8")
    x = torch.randn(5, 3, 32)
    with pytest.raises(RuntimeError, match="attn_mask must have the shape \\[5, 5\\] or \\[6, 5, 5\\], got \\[4, 5\\]"):
        module(x, x, x, attn_mask=torch.zeros(4, 5))
    with pytest.raises(RuntimeError, match="key_padding_mask must have the shape \\[3, 5\\]"):
        module(x, x, x, key_padding_mask=torch.zeros(2, 5))
    with pytest.raises(TypeError, match="attn_mask must have boolean or floating-point numbers"):
        module(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.long))


def test_it_compiles_into_one_graph():
    module = nn.MultiheadAttention(32, 2)
    cg.convert(module, "mxfp8")
    x = torch.randn(5, 3, 32)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, x, x)[0], module(x, x, x)[0])
