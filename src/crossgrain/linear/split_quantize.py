"""Quantizing groups of rows, each by its own quantizer, in one call where that gives the same bytes.

A block never reaches over the boundary of a group that is a multiple of the block along M. So formats
whose scales depend on a block alone (MX formats, FP8 in blocks, NVFP4 rows with an amax each) quantize the
whole tensor once, and a group's planes are views of the whole's. Formats with a number for the whole tensor
(per-tensor FP8, NVFP4), FP8 blocks along M that groups would share, and stochastic rounding, whose streams
begin anew in each group, are quantized by kernels that know of groups (`grouped_quantize`).

Only quantizers written by users, and columns that are made from quantized rows, go group by group. Bytes are the
same either way. Where rounding is stochastic both directions decide which way it is, even if only one is made:
what is drawn does not depend on whether there are gradients. So they do in the first pass of a reentrant
checkpoint, where each group shows its quantizer also what only backward reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..planes import ROWWISE, Direction
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
    """``tensor`` [sum of sections, K], in groups of so many rows, in the directions that the quantizers are set to.

    The quantizers of the groups are alike. ``disable_bulk_allocation``: no group is a part of larger memory.
    """
    usages = quantizers[0].get_usages()
    directions = [direction for direction in Direction if usages[direction.value]]
    if not directions:
        raise ValueError("neither rowwise nor columnwise data is asked for")
    if len(tensor) and quantizers[0].internal and not disable_bulk_allocation:
        if _quantizes_as_a_whole(quantizers[0], directions, split_sections):
            whole = _quantized(quantizers[0], tensor)
            ends = accumulate(split_sections)
            return [whole._sliced(0, end - size, end) for size, end in zip(split_sections, ends, strict=True)]
        if can_quantize_groups(quantizers):
            return quantize_groups(tensor, split_sections, quantizers)
    groups = zip(quantizers, tensor.split(list(split_sections)), strict=True)
    return [_quantized(quantizer, group) for quantizer, group in groups]


class Storing(Sequence[Quantizer]):
    """The quantizers as ones that make bare storages with these directions, each copied when it is asked for.

    Where groups are quantized as a whole only the first is, and a copy of a hybrid is not cheap.
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
    """One call for one tensor."""
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
    """``rows`` with zeros after each group, up to its ``padded`` size, and to the right, up to ``columns``."""
    if list(sizes) == list(padded) and rows.shape[1] == columns:
        return rows
    groups = zip(rows.split(list(sizes)), padded, strict=True)
    return torch.cat([padded_matrix(group, size, columns) for group, size in groups])
