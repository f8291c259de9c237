"""Quantize groups of rows, each with its own quantizer, in one call if that gives the same bytes.

If the sizes of groups are multiples of the block along M, no block contains rows of two groups. Formats whose scales
depend only on a block (MX formats, FP8 in blocks, NVFP4 with an amax per row) then quantize the whole tensor once, and
the planes of groups are views. Kernels for groups (`quantizers.groups`) are used for formats with a number for the
whole tensor (per-tensor FP8, NVFP4), for FP8 blocks along M that two groups would share, and for stochastic rounding,
whose random numbers begin again in each group.

Only custom quantizers, and columnwise planes that are made from rowwise planes, are quantized group by group. The bytes
are the same in all three ways. With stochastic rounding the way depends on both directions, even if only one is made,
so that the seeds do not depend on whether gradients are needed. The same is so in the first pass of a reentrant
checkpoint, in which each quantizer also measures what only backward reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..planes import ROWWISE, Direction
from ..quantizers import observer
from ..quantizers.base import Quantizer
from ..quantizers.groups import can_quantize_groups, quantize_groups
from ..quantizers.hybrid import rounds_stochastically
from ..runtime.passes import current_pass
from .padding import known_format, padded_matrix


def split_quantize(
    tensor: Tensor,
    split_sections: Sequence[int],
    quantizers: Sequence[Quantizer],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Quantize the rows of a tensor in groups, in the directions of the quantizers' usages.

    Args:
        tensor: a matrix [sum of sections, K].
        split_sections: number of rows of each group.
        quantizers: one quantizer for each group, all with the same configuration.
        disable_bulk_allocation: each group gets memory of its own.

    Returns:
        One quantized tensor or storage for each group.

    Raises:
        ValueError: neither rowwise nor columnwise usage is set.
    """
    usages = quantizers[0].get_usages()
    directions = [direction for direction in Direction if usages[direction.value]]
    if not directions:
        raise ValueError("split_quantize: neither rowwise nor columnwise usage of the quantizers is set")
    if len(tensor) and quantizers[0].internal and not disable_bulk_allocation:
        if _quantizes_as_a_whole(quantizers[0], directions, split_sections):
            with observer.of_all_groups() if observer.observers else nullcontext():
                whole = _quantized(quantizers[0], tensor)
            ends = accumulate(split_sections)
            return [whole._sliced(0, end - size, end) for size, end in zip(split_sections, ends, strict=True)]
        if can_quantize_groups(quantizers):
            return quantize_groups(tensor, split_sections, quantizers)
    groups = zip(quantizers, tensor.split(list(split_sections)), strict=True)
    return [_quantized(quantizer, group) for quantizer, group in groups]


class Storing(Sequence[Quantizer]):
    """Quantizers that make storages with these directions. Each is copied when it is first read.

    If the groups are quantized in one call, only the first is read, and a copy of a hybrid takes time.
    """

    def __init__(self, quantizers: Sequence[Quantizer], *, rowwise: bool, columnwise: bool) -> None:
        self._quantizers = quantizers
        self._usages = {"rowwise": rowwise, "columnwise": columnwise}
        self._copies: dict[int, Quantizer] = {}

    def __len__(self) -> int:
        return len(self._quantizers)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._copies:
            self._copies[index] = self._quantizers[index].storing(**self._usages)
        return self._copies[index]


def _quantized(quantizer: Quantizer, rows: Tensor) -> Any:
    """Quantize one tensor in one call."""
    return quantizer.quantize(rows)


def _quantizes_as_a_whole(quantizer: Quantizer, directions: Sequence[Direction], sizes: Sequence[int]) -> bool:
    if rounds_stochastically(quantizer) or current_pass().hides_gradients:
        directions = list(Direction)
    elif quantizer.derives_columns:
        directions = [ROWWISE, *directions]  # the columns are made from the rows
    boundaries = list(accumulate(sizes))[:-1]
    return all(_cuts_between_blocks(quantizer, direction, boundaries) for direction in directions)


def _cuts_between_blocks(quantizer: Quantizer, direction: Direction, boundaries: Sequence[int]) -> bool:
    fmt = known_format(quantizer, direction)
    if fmt is None or quantizer.encoding(direction).stochastic:
        return False
    if fmt.is_identity:
        return True
    along_m = fmt.block_rows if direction is ROWWISE else fmt.block_length
    own_amax = fmt.global_amax is None or (fmt.global_amax == "row" and direction is ROWWISE)
    return fmt.block is not None and own_amax and all(boundary % along_m == 0 for boundary in boundaries)


def padded_groups(rows: Tensor, sizes: Sequence[int], padded: Sequence[int], columns: int) -> Tensor:
    """``rows`` with zeros added after each group, up to its ``padded`` size, and on the right, up to ``columns``."""
    if list(sizes) == list(padded) and rows.shape[1] == columns:
        return rows
    groups = zip(rows.split(list(sizes)), padded, strict=True)
    return torch.cat([padded_matrix(group, size, columns) for group, size in groups])
