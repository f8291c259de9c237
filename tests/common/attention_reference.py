"""Attention written out in plain torch, for any dtype: what the modules are compared with."""

import torch


def may_look(queries, keys, *, causal=False, bottom_right=False, window=(-1, -1)):
    """[queries, keys] by loops: the definition."""
    shift = keys - queries if bottom_right else 0
    left, right = window
    right = 0 if causal else right
    allowed = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            distance = j - i - shift
            allowed[i, j] = (right < 0 or distance <= right) and (left < 0 or distance >= -left)
    return allowed


def attention(q, k, v, allowed, scale=None, sink=None):
    """q [heads, queries, d], k and v [groups, keys, d] of one sequence; queries that see nothing get 0.

    ``sink`` [heads] adds its exponential to the denominator of the softmax.
    """
    share = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if sink is None:
        return torch.softmax(scores.masked_fill(~allowed, -1e30), -1) * allowed @ v
    weights = scores.exp() * allowed
    return weights / (weights.sum(-1, keepdim=True) + sink.exp()[:, None, None]) @ v


def sequences(batch, queries, keys, heads=4, groups=2, d=8, dtype=torch.float64, d_v=None):
    """q, k, v as [batch, sequence, heads, d]; ``d_v`` are the channels of values, if they differ."""
    return (
        torch.randn(batch, queries, heads, d, dtype=dtype).requires_grad_(),
        torch.randn(batch, keys, groups, d, dtype=dtype).requires_grad_(),
        torch.randn(batch, keys, groups, d_v or d, dtype=dtype).requires_grad_(),
    )


def batched(q, k, v, allowed, scale=None, sink=None):
    """[batch, queries, heads · d]; ``allowed`` is a list, one for each sequence."""
    outs = [
        attention(*(x[i].transpose(0, 1) for x in (q, k, v)), allowed[i], scale, sink).transpose(0, 1).flatten(1)
        for i in range(len(q))
    ]
    return torch.stack(outs)


def gradients(y, dy, *inputs):
    return torch.autograd.grad(y, inputs, dy)
