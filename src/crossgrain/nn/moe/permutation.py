"""Sort the rows of tokens by the expert they go to, and undo it.

    rows, places = moe_permute(tokens, routing_map)       # the rows of expert 0, of expert 1, ...
    tokens = moe_unpermute(experts(rows), places, merging_probs=probs)

``places`` [tokens, experts] is the index of the row of a token for an expert, or -1 if the token does not go to that
expert. With ``map_type="index"``, where the map lists the experts of each token, ``places`` is [tokens, experts of a
token]. Quantized tensors are decoded.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...gemm.activations import compute_dtype
from ...runtime.host_and_device import require

MapType = Literal["mask", "index"]


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: MapType = "mask",
) -> tuple[Tensor, Tensor]:
    """Copy the rows of tokens, sorted by expert; the rows of each expert are in the order of the tokens.

    Args:
        inp: tokens, [tokens, K].
        routing_map: for "mask", [tokens, experts], not zero where a token goes to an expert; for "index", [tokens,
            experts of a token], the numbers of the experts.
        num_out_tokens: number of rows R, if it is known. If it is larger than needed, rows of zeros follow; if it is
            smaller, with "index", the last rows are dropped. With "mask" on a GPU, leaving it out makes the host wait.
        max_token_num: accepted; it has no effect.
        map_type: "mask" or "index".

    Returns:
        The rows [R, K], and their places.
    """
    places = _places(routing_map, map_type)
    if map_type == "index":
        rows = places.numel() if num_out_tokens < 0 else num_out_tokens
    else:
        rows = _row_count(places, num_out_tokens)
    places = torch.where(places < rows, places, -1)
    return _spread(inp, places, rows), places


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `moe_permute` with a mask. Return the rows, the probability of each from ``probs``, and the places."""
    places = _places(routing_map, "mask")
    rows = _row_count(places, num_out_tokens)
    return _spread(inp, places, rows), _picked(probs, places, rows), places


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Like `moe_permute_with_probs`, with rows of zeros after each expert up to a multiple of ``align_size``.

    Returns:
        The rows, their probabilities, their places (which include the padding), how far the rows of each expert were
        shifted by the padding (None if not at all), and the number of rows of each expert including padding.
    """
    counts = tokens_per_expert.to(torch.int64)
    padded = (counts + align_size - 1) // align_size * align_size
    moved = torch.cumsum(padded - counts, 0) - (padded - counts)
    places = _places(routing_map, "mask")
    there = (places >= 0).sum(0).to(counts.device)
    # All that has to be known of them, read at once: a GPU is waited for.
    wrong, rows, added = torch.stack([(there != counts).sum(), padded.sum(), (padded - counts).sum()]).tolist()
    if wrong:
        raise ValueError(
            f"tokens_per_expert is {counts.tolist()}, but the routing map has {there.tolist()} tokens per expert"
        )
    places = torch.where(places >= 0, places + moved.to(places.device), -1)
    offsets = moved if added else None
    return _spread(inp, places, rows), _picked(probs, places, rows), places, offsets, padded


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | tuple[int, ...] | None = None,
    map_type: MapType = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Add up the rows of each token, in float32 or wider.

    Args:
        inp: rows sorted by expert, [R, K].
        row_id_map: the places that `moe_permute` returned.
        merging_probs: factors of the rows, of the shape of ``row_id_map``.
        restore_shape: shape of the result; it is only checked.
        map_type: accepted; it has no effect.
        probs: older name of ``merging_probs``.
        pad_offsets: accepted; the places include the padding already.

    Returns:
        The tokens, [tokens, K].
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("moe_unpermute: probs is an older name of merging_probs; give one of them, not both")
        merging_probs = probs
    if merging_probs is not None and merging_probs.shape != row_id_map.shape:
        raise ValueError(
            f"moe_unpermute: merging_probs {list(merging_probs.shape)} must have the shape of row_id_map, "
            f"{list(row_id_map.shape)}"
        )
    pairs = _pairs(row_id_map, len(inp))
    rows = inp.index_select(0, row_id_map[pairs.tokens, pairs.experts].clamp(min=0).to(torch.int64))
    rows = rows.to(compute_dtype(rows))
    if merging_probs is not None:
        rows = rows * merging_probs[pairs.tokens, pairs.experts].to(rows.dtype).unsqueeze(-1)
    # What stands for no pair is added to a row after the last.
    count = row_id_map.shape[0]
    tokens = pairs.tokens.where(pairs.there, count)
    total = rows.new_zeros((count + 1, inp.shape[-1])).index_add(0, tokens, rows)[:count]
    if restore_shape is not None and tuple(restore_shape) != tuple(total.shape):
        raise ValueError(
            f"moe_unpermute: restore_shape is {list(restore_shape)}, but the result has shape {list(total.shape)}"
        )
    return total.to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Split the rows into chunks of ``split_sizes``, and reorder the chunks by ``sorted_index``."""
    return inp.index_select(0, _chunk_order(inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Like `moe_sort_chunks_by_index`, also for ``probs`` [rows]."""
    order = _chunk_order(inp, split_sizes, sorted_index)
    return inp.index_select(0, order), probs.index_select(0, order)


def _places(routing_map: Tensor, map_type: str) -> Tensor:
    """The index of the row of each token for each expert, or -1; rows are sorted by expert, then by token."""
    if map_type == "mask":
        goes = routing_map.to(torch.bool).t()
        places = torch.cumsum(goes.reshape(-1), 0).sub(1).reshape(goes.shape)
        return torch.where(goes, places, -1).t().contiguous()
    if map_type != "index":
        raise ValueError(f"map_type must be 'mask' or 'index', got {map_type!r}")
    rule = "the routing map has negative numbers of experts, which are not allowed; use num_out_tokens to drop tokens"
    require((routing_map >= 0).all(), rule, lambda: rule)
    order = torch.argsort(routing_map.reshape(-1), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places.reshape(routing_map.shape)


def _row_count(places: Tensor, asked: int) -> int:
    there = (places >= 0).sum()
    if asked < 0:
        return int(there)
    require(
        there <= asked,
        f"the routing map has more rows than num_out_tokens, {asked}",
        lambda: f"the routing map has {int(there)} rows, but num_out_tokens is {asked}",
    )
    return asked


class _Pairs(NamedTuple):
    """Pairs of tokens and experts that have a row, ordered by expert, so that sums on the CPU have a fixed order.

    Attributes:
        tokens: the token of each pair.
        experts: the expert of each pair.
        there: False for what stands for no pair, at the end: token 0 and expert 0.
    """

    tokens: Tensor
    experts: Tensor
    there: Tensor


def _pairs(places: Tensor, most: int) -> _Pairs:
    """The pairs that have a row. There are as many as rows, ``most``, or fewer; a GPU is not asked how many."""
    most = min(most, places.numel())  # without tokens there is not even token 0 to stand for no pair
    found = torch.nonzero_static((places >= 0).t(), size=most, fill_value=-1)
    experts, tokens = found.clamp(min=0).unbind(1)
    return _Pairs(tokens, experts, found[:, 0] >= 0)


def _spread(inp: Tensor, places: Tensor, rows: int) -> Tensor:
    if places.shape[0] != inp.shape[0]:
        raise ValueError(f"the routing map is for {places.shape[0]} tokens, but the input has {inp.shape[0]}")
    pairs = _pairs(places, rows)
    chosen = inp.index_select(0, pairs.tokens)
    return _at_rows(chosen, pairs, places, rows)


def _picked(probs: Tensor, places: Tensor, rows: int) -> Tensor:
    pairs = _pairs(places, rows)
    return _at_rows(probs[pairs.tokens, pairs.experts], pairs, places, rows)


def _at_rows(values: Tensor, pairs: _Pairs, places: Tensor, rows: int) -> Tensor:
    """The values of pairs at their rows, and zeros between them. What stands for no pair gets a row after the last."""
    index = places[pairs.tokens, pairs.experts].where(pairs.there, rows)
    return values.new_zeros((rows + 1, *values.shape[1:])).index_copy(0, index, values)[:rows]


def _chunk_order(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The row of the input for each row of the output. It is computed on the device of the input."""
    sizes, index = split_sizes.to(inp.device, torch.int64), sorted_index.to(inp.device, torch.int64)
    count, chunks = inp.shape[0], len(sizes)
    require(
        sizes.sum() == count,
        f"split_sizes do not add up to the {count} rows of the input",
        lambda: f"split_sizes {sizes.tolist()} do not add up to the {count} rows of the input",
    )
    rule = f"sorted_index must contain each of {chunks} chunks once"
    in_order = torch.arange(chunks, device=inp.device)
    if len(index) != chunks:
        raise ValueError(f"{rule}, got {index.tolist()}")
    require((index.sort().values == in_order).all(), rule, lambda: f"{rule}, got {index.tolist()}")
    moved = sizes[index]
    begins, targets = (sizes.cumsum(0) - sizes)[index], moved.cumsum(0) - moved
    shift = torch.repeat_interleave(begins - targets, moved, output_size=count)
    return torch.arange(count, device=inp.device) + shift
