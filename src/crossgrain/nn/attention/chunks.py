"""Which tokens of a sequence each rank has under context parallelism.

A sequence is cut into 2·R chunks for R ranks, and rank r has the chunks r and 2·R-1-r. Under a causal mask a late query
sees more keys than an early one, so an early and a late chunk together give all ranks the same work:

    R = 2, a sequence of 8 tokens                       keys of rank 0    keys of rank 1
                                                        0  1  6  7        2  3  4  5
    chunk    0     1     2     3        queries of  0   x
    token   0 1   2 3   4 5   6 7       rank 0      1   x  x
    rank     0     1     1     0                    6   x  x  x           x  x  x  x
                                                    7   x  x  x  x        x  x  x  x
                                        queries of  2   x  x              x
                                        rank 1      3   x  x              x  x
                                                    4   x  x              x  x  x
                                                    5   x  x              x  x  x  x

In "thd", every sequence of the batch is cut like this, and a rank has its two chunks of the first, then of the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.collectives import group_rank, group_size
from ...runtime.host_and_device import on_device, require


def whole_positions(places: Tensor, length: Tensor | int, rank: int, ranks: int) -> Tensor:
    """The positions in the whole sequence of tokens at ``places`` of a rank's part, which has ``length`` tokens."""
    half = length // 2
    return places + torch.where(places < half, rank * half, (2 * ranks - 2 - rank) * half)


def tokens_of_rank(starts: Tensor, rank: int, ranks: int, count: int | None = None) -> Tensor:
    """The tokens of a rank among all tokens of several sequences.

    Args:
        starts: where the sequences begin, and at last where they end, [sequences + 1].
        rank: the rank.
        ranks: number of ranks.
        count: number of tokens of a rank; None to compute it, which waits for a GPU.
    """
    begins, lengths = starts[:-1] // ranks, starts.diff() // ranks
    places = torch.arange(int(lengths.sum()) if count is None else count, device=starts.device)
    sequences = torch.arange(len(lengths), device=starts.device)
    of_token = torch.repeat_interleave(sequences, lengths, output_size=len(places))
    positions = whole_positions(places - begins[of_token], lengths[of_token], rank, ranks)
    return starts[of_token] + positions


def checked_starts(what: str, starts: Tensor, ranks: int) -> Tensor:
    """``starts`` as int64, if every sequence can be cut into 2 chunks for each rank."""
    starts = starts.to(torch.int64)
    lengths = starts.diff()
    rule = f"cannot be cut into 2 equal chunks for each of {ranks} ranks; pad them to multiples of {2 * ranks}"
    require(
        ~(lengths % (2 * ranks)).any(),
        f"{what}: sequences {rule}",
        lambda: f"{what}: sequences of {lengths.tolist()} tokens {rule}",
    )
    return starts


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor | None,
    input_ids_padded: Tensor | None,
    labels_padded: Tensor | None,
    position_ids_padded: Tensor | None,
    cp_group: Any = None,
    qvk_format: str = "thd",
    cp_rank: int | None = None,
) -> tuple[Tensor | None, ...]:
    """Take this rank's chunks of a batch.

    Args:
        cu_seqlens_padded: for "thd", where the sequences begin, [sequences + 1]; not used otherwise.
        input_ids_padded: token numbers: [tokens] or [1, tokens] for "thd", [batch, sequence] for "bshd",
            [sequence, batch] for "sbhd". Further dimensions may follow. None is returned as it is, here and below.
        labels_padded: labels, in the same layout.
        position_ids_padded: positions, in the same layout.
        cp_group: process group of the ranks that share the sequences; None for all ranks.
        qvk_format: "thd", "bshd" or "sbhd".
        cp_rank: the rank in the group; by default this one.

    Returns:
        The parts of the three tensors.
    """
    if qvk_format not in ("thd", "bshd", "sbhd"):
        raise ValueError(f"qvk_format must be one of thd, bshd, sbhd, got {qvk_format!r}")
    if qvk_format == "thd" and cu_seqlens_padded is None:
        raise ValueError("qvk_format='thd' needs cu_seqlens_padded, which says where each sequence begins")
    ranks = group_size(cp_group)
    rank = group_rank(cp_group) if cp_rank is None else cp_rank

    def part(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if cu_seqlens_padded is None or qvk_format != "thd":
            dim = 0 if qvk_format == "sbhd" else 1
            starts = on_device([0, x.shape[dim]], x.device)
        else:
            starts = cu_seqlens_padded.to(x.device)
            dim = 1 if x.dim() > 1 and x.shape[0] == 1 else 0
            known = f"the batch has a tensor of shape {list(x.shape)}, but cu_seqlens_padded ends at"
            require(starts[-1] == x.shape[dim], f"{known} another token", lambda: f"{known} {int(starts[-1])} tokens")
        starts = checked_starts("get_batch_on_this_cp_rank", starts, ranks)
        return x.index_select(dim, tokens_of_rank(starts, rank, ranks, x.shape[dim] // ranks))

    return part(input_ids_padded), part(labels_padded), part(position_ids_padded)


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad each of several packed sequences at its end to a multiple of ``divisibility_factor``.

    Args:
        input_ids: token numbers of all sequences, [tokens] or [1, tokens].
        labels: their labels, the same.
        cu_seqlens: where the sequences begin, [sequences + 1].
        divisibility_factor: 2 · ranks for context parallelism.
        padding_token_id: token number of padding.
        padding_label_id: label of padding.

    Returns:
        The padded token numbers and labels, [tokens], and where the padded sequences begin.
    """
    lengths = cu_seqlens.diff()
    padded = _padded(lengths, divisibility_factor)
    starts = torch.cat((cu_seqlens[:1], padded.cumsum(0))).to(cu_seqlens.dtype)
    tokens = torch.arange(int(lengths.sum()), device=cu_seqlens.device)
    places = tokens + torch.repeat_interleave(starts[:-1] - cu_seqlens[:-1], lengths)

    def spread(x: Tensor, filler: int) -> Tensor:
        flat = x.reshape(-1)
        return flat.new_full((int(starts[-1]),), filler).index_copy(0, places.to(x.device), flat)

    return spread(input_ids, padding_token_id), spread(labels, padding_label_id), starts


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """The positions of tokens in their sequences, if these are padded to multiples of ``divisibility_factor``."""
    padded = _padded(cu_seqlens.diff(), divisibility_factor)
    places = torch.arange(int(padded.sum()), device=cu_seqlens.device)
    return (places - torch.repeat_interleave(padded.cumsum(0) - padded, padded)).to(dtype)


def _padded(lengths: Tensor, multiple: int) -> Tensor:
    return (lengths + multiple - 1) // multiple * multiple
