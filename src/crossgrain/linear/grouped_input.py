"""Inputs of grouped layers that are already quantized, such as tokens that were sent quantized to another rank.

fprop reads their rowwise planes. wgrad reads columnwise planes, whose blocks contain numbers of many rows, so they are
made here from the decoded rows. This is right if the quantizer makes columnwise planes from decoded rowwise planes
(``columnwise_source="rowwise_dequantized"``), if both directions have the same codes (FP8 with one scale), or if
backward multiplies decoded rows. It is not possible for a quantizer that makes columnwise planes from the original.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..planes import ROWWISE, Plane
from ..planes.rows import bytes_of_rows, plane_of_rows, rows_stand_alone
from ..planes.slicing import slice_plane
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..recipe.base import BackwardOverride
from ..tensor import QuantizedTensor, QuantizedTensorStorage
from .call import LinearCall
from .gather_activations import columns_follow_from_rows
from .padding import Sizes, known_format, padded_matrix


def quantizer_of_rows(quantizer: Quantizer) -> Quantizer:
    """The quantizer that makes rowwise planes: itself, or the rowwise child of a hybrid."""
    return quantizer._quantizer_of(ROWWISE) if isinstance(quantizer, HybridQuantizer) else quantizer


def why_not_sent(quantizer: Quantizer) -> str | None:
    """Why rows that ``quantizer`` has quantized cannot be sent to different ranks, and what to do; None if they can."""
    row = quantizer_of_rows(quantizer)
    if row.custom:
        return "the bytes that a custom quantizer makes may depend on the position of a row; use a built-in format"
    if row.encoding(ROWWISE).stochastic:
        return (
            "stochastic rounding depends on the position of a row among all tokens of its expert; round the input to "
            "nearest"
        )
    fmt = row.encoding(ROWWISE).format
    if not rows_stand_alone(fmt):
        return (
            f"a rowwise {fmt.name} block spans {fmt.block_rows} rows, which may belong to different experts; use a "
            "format with blocks of one row for the input"
        )
    if any(given is not None for given in row._given()):
        return (
            f"its {fmt.name} scale is set from outside, as by delayed scaling, so it may differ between ranks; use "
            "current scaling for the input"
        )
    return None


def why_rows_are_not_enough(quantizer: Quantizer, override: BackwardOverride, keeps_input: bool) -> str | None:
    """Why the rowwise plane of an input is not enough for wgrad, and what to do; None if it is."""
    if keeps_input:
        return "save_original_input keeps the input in high precision; switch it off"
    if override == "high_precision":
        return "backward_override='high_precision' multiplies the input in high precision; use 'dequantized'"
    if override == "dequantized":
        return None
    if quantizer.derives_columns or columns_follow_from_rows(quantizer):
        return None
    return (
        "its columnwise plane is made from the input in high precision; use 'input.source: dequantized' in the recipe "
        "to make it from the rowwise plane"
    )


def takes_rows(x: QuantizedTensor, call: LinearCall, *, wgrad: bool) -> bool:
    """Whether the layer can use the rowwise plane of ``x`` as it is. Otherwise ``x`` is decoded and quantized again.

    Raises:
        ValueError: ``x`` has only a rowwise plane, and wgrad needs more.
    """
    quantizer, row = call.input, x.plane(ROWWISE)
    if quantizer is None or row is None or row.format.is_identity or row.format != known_format(quantizer, ROWWISE):
        return False
    if not rows_stand_alone(row.format) or _has_history(quantizer):
        return False
    reason = why_rows_are_not_enough(quantizer, call.backward_override, call.keep_input) if wgrad else None
    if reason is None:
        return True
    if not x.get_usages()["columnwise"]:
        raise ValueError(
            f"{call.layer}: the input {list(x.shape)} has only a rowwise {row.format.name} plane, which is not enough "
            f"for wgrad: {reason}"
        )
    return False


def _has_history(quantizer: Quantizer) -> bool:
    """Whether a quantizer keeps a history of amaxes, so that it must measure every input."""
    return bool(quantizer_of_rows(quantizer).statistics())


def hollow_rows(x: Tensor) -> Tensor:
    """A tensor with the shape and dtype of the rows of ``x``, but with memory for a single number."""
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape[:-1].numel(), x.shape[-1])


def given_groups(
    x: QuantizedTensor, sizes: Sequence[int], padded: Sequence[Sizes], calls: Sequence[LinearCall], *, columnwise: bool
) -> list[QuantizedTensorStorage]:
    """The storages of all groups: parts of the rowwise plane of ``x``, and columnwise planes made from them.

    Raises:
        ValueError: the columns would have to be padded.
    """
    row = x.plane(ROWWISE)
    assert row is not None
    if padded[0].k != row.shape[1]:
        raise ValueError(
            f"{calls[0].layer}: the input {list(x.shape)} is already quantized and cannot be padded to {padded[0].k} "
            "columns, which the blocks of the other operands need"
        )
    heights = [size.m for size in padded]
    whole = row if heights == list(sizes) else _padded_rows(row, sizes, heights)
    made, start = [], 0
    for height, call in zip(heights, calls, strict=True):
        assert call.input is not None
        part = slice_plane(whole, whole.shape, 0, start, start + height)
        made.append(_storage(call.input, part, call.dtype, columnwise))
        start += height
    return made


def _padded_rows(plane: Plane, sizes: Sequence[int], heights: Sequence[int]) -> Plane:
    groups = bytes_of_rows(plane).split(list(sizes))
    rows = [padded_matrix(group, height, group.shape[1]) for group, height in zip(groups, heights, strict=True)]
    return plane_of_rows(torch.cat(rows), plane)


def _storage(quantizer: Quantizer, row: Plane, dtype: torch.dtype, columnwise: bool) -> QuantizedTensorStorage:
    if isinstance(quantizer, HybridQuantizer):
        hybrid = quantizer.storing(rowwise=True, columnwise=columnwise)
        made: QuantizedTensorStorage = hybrid.quantized_from_rows(
            hybrid._made_child(ROWWISE)._holding([row], row.shape, dtype)
        )
        return made
    made = quantizer.storing(rowwise=True, columnwise=False)._holding([row], row.shape, dtype)
    if columnwise:
        made.update_usage(columnwise_usage=True)
    return made
