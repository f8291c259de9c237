"""The softmax of attention, also with a sink.

    vanilla     exp(x_i) /            sum_j exp(x_j)
    off-by-one  exp(x_i) / (1      +  sum_j exp(x_j))
    learnable   exp(x_i) / (exp(a) +  sum_j exp(x_j)), with a parameter ``a`` for each head

A sink is one more key that every query sees, with the score 0 or ``a`` and the value 0: it takes a part of the softmax
and adds nothing to the output, so that a query can look at nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class Softmax(NamedTuple):
    """Result of `softmax`: the part of each key, and that of the sink, [batch, heads, queries, 1], if there is one."""

    keys: Tensor
    sink: Tensor | None


def softmax(scores: Tensor, allowed: Tensor | None, sink: Tensor | None) -> Softmax:
    """Softmax of each row of ``scores`` [batch, heads, queries, keys].

    Args:
        scores: the scores.
        allowed: True where a query may see a key; the result is 0 elsewhere. None if every query may see every key.
        sink: the score of the sink by head, [1, heads, 1, 1]; None if there is none.
    """
    visible = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    if sink is None:
        parts = torch.softmax(visible, -1)
        return Softmax(parts if allowed is None else parts.masked_fill(~allowed, 0), None)
    column = sink.to(scores.dtype).expand(*scores.shape[:-1], 1)
    parts = torch.softmax(torch.cat((visible, column), -1), -1)
    return Softmax(parts[..., :-1], parts[..., -1:])


def largest_by_head(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """The largest score that counts, by head: [heads]. It is -inf if no query may see a key."""
    visible = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    return visible.detach().amax((0, 2, 3))
