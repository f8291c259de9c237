"""Which tokens of a sequence each rank has in context parallelism."""

from __future__ import annotations

import torch
from torch import Tensor

from ...nn.attention.chunks import checked_starts, tokens_of_rank


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Return the indices of the tokens of ``rank``.

    Each sequence is divided into ``2 · world_size`` equal parts. A rank has the parts ``rank`` and
    ``2 · world_size - 1 - rank``, so that causal attention costs each rank the same.

    Raises:
        ValueError: a sequence cannot be divided evenly, or the sequences have more than ``total_tokens`` tokens.
    """
    if len(cu_seqlens) and int(cu_seqlens[-1]) > total_tokens:
        raise ValueError(
            f"the sequences have {int(cu_seqlens[-1])} tokens together, but total_tokens is {total_tokens}"
        )
    starts = checked_starts("thd_get_partitioned_indices", cu_seqlens, world_size)
    return tokens_of_rank(starts, rank, world_size).to(torch.int32)
