"""Multihead attention and transformer layers written out in plain torch, on the parameters of the modules.

Inputs are [batch, sequence, hidden]. Everything is a function, so that autograd gives the gradients of both
sides with respect to the same parameters.
"""

import torch
from torch.nn import functional as F

from .attention_reference import batched


def norm(x, module, prefix="layer_norm_", eps=1e-5):
    weight = getattr(module, f"{prefix}weight")
    bias = getattr(module, f"{prefix}bias", None)
    if bias is not None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def joined(module, names):
    """The weights and biases of a projection, one under the other."""
    weights = [getattr(module, f"{name}_weight" if name else "weight") for name in names]
    biases = [getattr(module, f"{name}_bias" if name else "bias") for name in names]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


def rows_of(mha, wanted):
    """For each of "q", "k", "v" in ``wanted``: which rows of the projection are its heads', by loops."""
    heads, groups = mha.num_attention_heads, mha.num_gqa_groups
    rows, at = {name: [] for name in wanted}, 0
    sizes = {"q": heads, "k": groups, "v": groups}
    if mha.qkv_weight_interleaved and len(wanted) > 1:
        order = [name for _ in range(groups) for name in wanted for _ in range(sizes[name] // groups)]
    else:
        order = [name for name in wanted for _ in range(sizes[name])]
    for name in order:
        rows[name] += range(at, at + channels(mha, name))
        at += channels(mha, name)
    return rows


def channels(mha, name):
    return mha.hidden_size_per_attention_head_v if name == "v" else mha.hidden_size_per_attention_head


def projected(mha, module, x, wanted):
    names = {"q": "query", "k": "key", "v": "value"}
    weight, bias = joined(module, [""] if mha.fuse_qkv_params else [names[name] for name in wanted])
    y = F.linear(x, weight, bias)
    return [y[..., rows].unflatten(-1, (-1, channels(mha, name))) for name, rows in rows_of(mha, wanted).items()]


def multihead(mha, x, allowed, encoder_output=None, change_heads=lambda q, k: (q, k), sink=None):
    """The output without the last bias, and the normalized input."""
    normalized = x
    if encoder_output is None:
        module = mha.layernorm_qkv if mha.input_layernorm else mha.qkv
    else:
        module = mha.layernorm_query if mha.input_layernorm else mha.query_layer
    if mha.input_layernorm:
        normalized = norm(x, module)
    if encoder_output is None:
        q, k, v = projected(mha, module, normalized, "qkv")
    else:
        (q,) = projected(mha, module, normalized, "q")
        k, v = projected(mha, mha.key_value, encoder_output, "kv")
    q, k = change_heads(q, k)
    return F.linear(batched(q, k, v, allowed, sink=sink), mha.proj.weight), normalized


def mlp(module, x):
    """The output, with its bias, and the normalized input."""
    normalized = norm(x, module)
    hidden = F.gelu(F.linear(normalized, module.fc1_weight, module.fc1_bias), approximate="tanh")
    return F.linear(hidden, module.fc2_weight, module.fc2_bias), normalized


def transformer(layer, x, allowed, encoder_output=None, allowed_encoder=None):
    def attended(module, x, allowed, *args):
        y, normalized = multihead(module, x, allowed, *args)
        y = y if module.proj.bias is None else y + module.proj.bias
        return y, normalized

    def residual(x, normalized):
        return normalized if layer.apply_residual_connection_post_layernorm else x

    y, normalized = attended(layer.self_attention, x, allowed)
    if layer.parallel_attention_mlp:
        return x + y + mlp(layer.layernorm_mlp, x)[0]
    x = y + residual(x, normalized)
    if encoder_output is not None:
        y, normalized = attended(layer.inter_attention, x, allowed_encoder, encoder_output)
        x = y + residual(x, normalized)
    y, normalized = mlp(layer.layernorm_mlp, x)
    x = y + residual(x, normalized)
    return norm(x, layer.layernorm, "") if layer.output_layernorm else x


def assert_same(mine, exact, module, *inputs):
    """Outputs and all gradients in float64: they differ by the order of sums."""
    torch.testing.assert_close(mine, exact, rtol=0, atol=1e-9)
    wanted = [*inputs, *module.parameters()]
    dy = torch.randn_like(exact)
    a, b = (torch.autograd.grad(y, wanted, dy, allow_unused=True) for y in (mine, exact))
    for (name, one), other in zip([*enumerate(a)], b, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
