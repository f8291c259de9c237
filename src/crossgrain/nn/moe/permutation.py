"""Rows of tokens sorted by the expert they go to, and back.

    rows, places = moe_permute(tokens, routing_map)       # the rows of expert 0, of expert 1, ...
    tokens = moe_unpermute(experts(rows), places, merging_probs=probs)

``places`` [tokens, experts] says which row a token has at an expert, -1 for none; with ``map_type="index"``, where the
map names the experts of each token, it is [tokens, experts of a token]. Quantized tensors are decoded.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...gemm.activations import compute_dtype

MapType = Literal["mask", "index"]


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: MapType = "mask",
) -> tuple[Tensor, Tensor]:
    """Rows [R, K] of ``inp`` [tokens, K] sorted by expert, in the order of tokens for each, and their places.

    ``routing_map``     "mask": [tokens, experts], not zero where a token goes to an expert;
                        "index": [tokens, experts of a token], the numbers of the experts
    ``num_out_tokens``  R, if it is known. More than there are: rows of zeros follow. Fewer, with "index": the last
                        are dropped
    ``max_token_num``   has no meaning here
    """
    places = _places(routing_map, map_type)
    rows = _row_count(places, num_out_tokens, may_drop=map_type == "index")
    places = torch.where(places < rows, places, -1)
    return _spread(inp, places, rows), places


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by a mask, with the probability of each row out of ``probs`` [tokens, experts]: rows, probs, places."""
    places = _places(routing_map, "mask")
    rows = _row_count(places, num_out_tokens, may_drop=False)
    return _spread(inp, places, rows), _picked(probs, places, rows), places


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The same, with zeros after the rows of each expert up to a multiple of ``align_size``.

    Returns rows, probs, places, how far the rows of each expert have moved (None: not at all), and how many rows
    each expert has now. The places know of the padding.
    """
    counts = tokens_per_expert.to(torch.int64)
    padded = (counts + align_size - 1) // align_size * align_size
    moved = torch.cumsum(padded - counts, 0) - (padded - counts)
    places = _places(routing_map, "mask")
    if not torch.equal((places >= 0).sum(0).to(counts.device), counts):
        raise ValueError(
            f"tokens_per_expert is {counts.tolist()}, but the routing map has {(places >= 0).sum(0).tolist()}"
        )
    places = torch.where(places >= 0, places + moved.to(places.device), -1)
    rows = int(padded.sum())
    offsets = None if torch.equal(padded, counts) else moved
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
    """Each token's rows added up in float32 or wider, times ``merging_probs``, of the shape of the places, if given.

    ``probs`` is an older name of ``merging_probs``. ``restore_shape`` and ``pad_offsets`` follow from the places.
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("moe_unpermute: merging_probs and probs are the same; give one of them")
        merging_probs = probs
    if merging_probs is not None and merging_probs.shape != row_id_map.shape:
        raise ValueError(
            f"moe_unpermute: merging_probs {list(merging_probs.shape)} have another shape than the places "
            f"{list(row_id_map.shape)}"
        )
    tokens, experts = _pairs(row_id_map)
    rows = inp.index_select(0, row_id_map[tokens, experts].to(torch.int64))
    rows = rows.to(compute_dtype(rows))
    if merging_probs is not None:
        rows = rows * merging_probs[tokens, experts].to(rows.dtype).unsqueeze(-1)
    total = rows.new_zeros((row_id_map.shape[0], inp.shape[-1])).index_add(0, tokens, rows)
    if restore_shape is not None and tuple(restore_shape) != tuple(total.shape):
        raise ValueError(f"moe_unpermute: restore_shape {list(restore_shape)}, but there are {list(total.shape)}")
    return total.to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The chunks of rows of ``split_sizes`` in the order of ``sorted_index``."""
    return inp.index_select(0, _chunk_order(inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, also for ``probs`` [rows]."""
    order = _chunk_order(inp, split_sizes, sorted_index)
    return inp.index_select(0, order), probs.index_select(0, order)


def _places(routing_map: Tensor, map_type: str) -> Tensor:
    """Which row each token has at each expert, -1 for none: experts in order, tokens in order for each."""
    if map_type == "mask":
        goes = routing_map.to(torch.bool).t()
        places = torch.cumsum(goes.reshape(-1), 0).sub(1).reshape(goes.shape)
        return torch.where(goes, places, -1).t().contiguous()
    if map_type != "index":
        raise ValueError(f"map_type is 'mask' or 'index', not {map_type!r}")
    if bool((routing_map < 0).any()):
        raise ValueError("the routing map has negative numbers of experts; tokens are dropped by num_out_tokens")
    order = torch.argsort(routing_map.reshape(-1), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places.reshape(routing_map.shape)


def _row_count(places: Tensor, asked: int, *, may_drop: bool) -> int:
    there = int((places >= 0).sum())
    if asked < 0:
        return there
    if asked < there and not may_drop:
        raise ValueError(f"the routing map has {there} rows, num_out_tokens says {asked}")
    return asked


def _pairs(places: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and experts that have a row, experts in order: sums over experts have one order."""
    experts, tokens = (places >= 0).t().nonzero(as_tuple=True)
    return tokens, experts


def _spread(inp: Tensor, places: Tensor, rows: int) -> Tensor:
    if places.shape[0] != inp.shape[0]:
        raise ValueError(f"the routing map is for {places.shape[0]} tokens, the input has {inp.shape[0]}")
    tokens, experts = _pairs(places)
    chosen = inp.index_select(0, tokens)
    return chosen.new_zeros((rows, inp.shape[-1])).index_copy(0, places[tokens, experts], chosen)


def _picked(probs: Tensor, places: Tensor, rows: int) -> Tensor:
    tokens, experts = _pairs(places)
    return probs.new_zeros(rows).index_copy(0, places[tokens, experts], probs[tokens, experts])


def _chunk_order(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    sizes = split_sizes.tolist()
    if sum(sizes) != inp.shape[0]:
        raise ValueError(f"chunks of {sizes} rows do not make up {inp.shape[0]} rows")
    if sorted(sorted_index.tolist()) != list(range(len(sizes))):
        raise ValueError(f"sorted_index {sorted_index.tolist()} does not have each of {len(sizes)} chunks once")
    chunks = torch.arange(inp.shape[0], device=inp.device).split(sizes)
    return torch.cat([chunks[index] for index in sorted_index.tolist()])
