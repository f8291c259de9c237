"""Which tokens of a sequence each rank has in context parallelism."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Return the indices of the tokens of ``rank``.

    Each sequence is divided into ``2 · world_size`` equal parts. A rank has the parts ``rank`` and
    ``2 · world_size - 1 - rank``, so that causal attention costs each rank the same.

    Raises:
        ValueError: a sequence cannot be divided evenly, or the sequences have more than ``total_tokens`` tokens.
    """
    borders = cu_seqlens.tolist()
    parts = 2 * world_size
    chosen = []
    for first, last in pairwise(borders):
        length = last - first
        if length % parts:
            raise ValueError(f"a sequence of {length} tokens cannot be divided into {parts} equal parts")
        size = length // parts
        for part in (rank, parts - 1 - rank):
            chosen.append(torch.arange(first + part * size, first + (part + 1) * size))
    indices = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)
    if borders and borders[-1] > total_tokens:
        raise ValueError(f"the sequences have {borders[-1]} tokens together, but total_tokens is {total_tokens}")
    return indices.to(device=cu_seqlens.device, dtype=torch.int32)
