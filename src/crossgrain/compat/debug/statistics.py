"""Statistics of tensors and of planes, as sums and extremes that microbatches and ranks can be added up from.

A statistic follows from *parts*: the number of elements, sums, the smallest and the largest number. Parts of several
tensors are merged as if the tensors were one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ... import kernels
from ...kernels.reference.decode import decode_factors
from ...kernels.reference.hadamard import rotate
from ...linear.padding import padded_matrix
from ...planes import ROWWISE, Plane
from .stat_names import BLOCKWISE, PlaneStat, TensorStat

Parts = dict[str, float]
"""Numbers by name. How two of a name are merged follows from its last word: ``min``, ``max``, ``spread`` or a sum."""

COUNT, TOTAL, SPREAD = "count", "total", "spread"


def merged(parts: Iterable[Parts]) -> Parts:
    """The parts of several tensors as if they were one."""
    whole: Parts = {}
    for each in parts:
        whole = _merged_pair(whole, each) if whole else dict(each)
    return whole


def _merged_pair(one: Parts, other: Parts) -> Parts:
    made: Parts = {}
    for name in (*one, *(name for name in other if name not in one)):
        found = [parts[name] for parts in (one, other) if name in parts]
        kind = name.rpartition(" ")[2]
        if len(found) == 1:
            made[name] = found[0]
        elif kind in ("min", "max"):
            made[name] = _extreme(found, min if kind == "min" else max)
        elif name == SPREAD:  # sum of squared distances from the mean
            counts, means = [p[COUNT] for p in (one, other)], [p[TOTAL] / p[COUNT] for p in (one, other)]
            apart = (means[0] - means[1]) ** 2 * counts[0] * counts[1] / (counts[0] + counts[1])
            made[name] = found[0] + found[1] + apart
        else:
            made[name] = found[0] + found[1]
    return made


def _extreme(values: list[float], choose: Callable[[list[float]], float]) -> float:
    return math.nan if any(map(math.isnan, values)) else choose(values)


class Statistic(NamedTuple):
    """A statistic: the parts it needs, and how it follows from them.

    Attributes:
        name: the name in logs.
        needs: names of the parts.
        value: computes it from merged parts.
    """

    name: str
    needs: tuple[str, ...]
    value: Callable[[Mapping[str, float]], float]


# ---- tensors in high precision -------------------------------------------------------------------------------

_OF_TENSORS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, float]], float]]] = {
    "min": (("min",), lambda p: p["min"]),
    "max": (("max",), lambda p: p["max"]),
    "mean": ((COUNT, TOTAL), lambda p: p[TOTAL] / p[COUNT]),
    "std": ((COUNT, TOTAL, SPREAD), lambda p: math.sqrt(p[SPREAD] / (p[COUNT] - 1)) if p[COUNT] > 1 else math.nan),
    "l1_norm": (("magnitudes",), lambda p: p["magnitudes"]),
    "l2_norm": (("squares",), lambda p: math.sqrt(p["squares"])),
    "cur_amax": (("magnitude max",), lambda p: p["magnitude max"]),
    "dynamic_range": (
        ("magnitude max", "magnitude min"),
        lambda p: math.log2(p["magnitude max"] / p["magnitude min"]) if 0 < p["magnitude max"] < math.inf else 0.0,
    ),
}


def statistic_of_tensor(stat: TensorStat) -> Statistic:
    """The statistic of a tensor in high precision."""
    if stat.kind == BLOCKWISE:
        key = _range_key(stat)
        return Statistic(stat.name, (key,), lambda parts: parts[key])
    needs, value = _OF_TENSORS[stat.kind]
    return Statistic(stat.name, needs, value)


def parts_of_tensor(tensor: Tensor, stats: Iterable[TensorStat]) -> Parts:
    """The parts that some statistics need. ``tensor`` must not be empty."""
    stats = list(stats)
    needed = {name for stat in stats for name in statistic_of_tensor(stat).needs}
    numbers, parts = tensor.detach(), Parts()
    wide = numbers.dtype if numbers.dtype == torch.float64 else torch.float32
    magnitudes = numbers.abs().to(wide) if needed & {"magnitudes", "magnitude max", "magnitude min"} else numbers
    for name in sorted(needed):
        if name == COUNT:
            parts[name] = float(numbers.numel())
        elif name in ("min", "max"):
            parts[name] = float(numbers.min() if name == "min" else numbers.max())
        elif name == TOTAL:
            parts[name] = float(numbers.sum(dtype=torch.float64))
        elif name == SPREAD:
            parts[name] = float(numbers.to(torch.float64).var(correction=0)) * numbers.numel()
        elif name == "magnitudes":
            parts[name] = float(magnitudes.sum(dtype=torch.float64))
        elif name == "squares":
            parts[name] = float(numbers.to(torch.float64).square().sum())
        elif name == "magnitude max":
            parts[name] = float(magnitudes.max())
        elif name == "magnitude min":  # of those that are not zero
            parts[name] = float(torch.where(magnitudes == 0, math.inf, magnitudes).min())
    for stat in stats:
        if stat.kind == BLOCKWISE:
            parts[_range_key(stat)] = _largest_range(numbers.to(wide), stat)
    return parts


def _range_key(stat: TensorStat) -> str:
    return f"{stat.block_size} {stat.dims} {'both' if stat.both_orientations else 'rows'} range max"


def _largest_range(numbers: Tensor, stat: TensorStat) -> float:
    """The largest log2(amax / smallest magnitude that is not zero) of a block; 0 if all is zero."""
    matrix = numbers.reshape(-1, numbers.shape[-1]).abs()
    found = [_range_of_rows(matrix, stat)]
    if stat.both_orientations:
        found.append(_range_of_rows(matrix.t(), stat))
    return max(found)


def _range_of_rows(matrix: Tensor, stat: TensorStat) -> float:
    size, tall = stat.block_size, stat.block_size if stat.dims == 2 else 1
    rows, columns = -(-matrix.shape[0] // tall), -(-matrix.shape[1] // size)
    blocks = padded_matrix(matrix, rows * tall, columns * size).reshape(rows, tall, columns, size)
    high, low = blocks.amax((1, 3)), torch.where(blocks == 0, math.inf, blocks).amin((1, 3))
    there = high > 0
    if not there.any():
        return 0.0
    return float((torch.log2(high[there]) - torch.log2(low[there])).max())


# ---- quantized tensors ---------------------------------------------------------------------------------------


def statistic_of_plane(stat: PlaneStat) -> Statistic:
    """The statistic of a quantized tensor."""
    key = _plane_key(stat)
    if stat.kind in ("scale_inv_min", "scale_inv_max"):
        scale = f"{key} scale {stat.kind.rpartition('_')[2]}"
        return Statistic(stat.name, (scale,), lambda parts: parts[scale])
    count, part = f"{key} {COUNT}", f"{key} {stat.kind}"
    factor = 1.0 if stat.kind == "mse" else 100.0
    return Statistic(stat.name, (count, part), lambda parts: factor * parts[part] / parts[count])


def _plane_key(stat: PlaneStat) -> str:
    return f"{stat.recipe} {stat.direction.value}"


def parts_of_plane(tensor: Tensor, plane: Plane, stats: Iterable[PlaneStat]) -> Parts:
    """The parts that some statistics of one plane need.

    Args:
        tensor: what the plane was made from, without padding.
        plane: the plane.
        stats: statistics of the recipe and direction of this plane.
    """
    stats, parts = list(stats), Parts()
    key, kinds = _plane_key(stats[0]), {stat.kind for stat in stats}
    if {"scale_inv_min", "scale_inv_max"} & kinds:
        scales = decode_factors(plane)
        parts |= {f"{key} scale min": float(scales.min()), f"{key} scale max": float(scales.max())}
    if kinds <= {"scale_inv_min", "scale_inv_max"}:
        return parts
    parts[f"{key} {COUNT}"] = float(tensor.numel())
    numbers = tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.float32)
    if "overflows%" in kinds:
        parts[f"{key} overflows%"] = float((numbers.abs() > _largest(plane)).sum())
    if "mse" in kinds:
        decoded = kernels.decode(plane, torch.float32)[: numbers.shape[0], : numbers.shape[1]]
        parts[f"{key} mse"] = float((decoded - numbers).to(torch.float64).square().sum())
    if "underflows%" in kinds:
        parts[f"{key} underflows%"] = _underflows(numbers, plane)
    return parts


def _underflows(numbers: Tensor, plane: Plane) -> float:
    """How many numbers are zero that were not; with a rotation, of the rotated numbers, which are rounded."""
    if plane.format.rotation is not None:
        padded = padded_matrix(numbers, *plane.shape)
        operand = padded if plane.direction is ROWWISE else padded.t()
        numbers = rotate(operand.contiguous(), plane.format.rotation)
    return float(numbers.count_nonzero() - kernels.decode_operand(plane).count_nonzero())


def _largest(plane: Plane) -> float:
    """The largest number that a plane with one scale for the whole tensor can hold."""
    assert plane.format.element is not None and plane.format.block is None
    return plane.format.element.max * float(decode_factors(plane))
