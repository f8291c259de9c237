"""Statistics of a tensor, and of a plane that was made from it. docs/how-to/inspect.md says what each number means.

All of them are computed on the operand of the plane: the matrix [R, C] with blocks along the last dimension, which is
the transposed tensor for a columnwise plane, and rotated if the format rotates. A rotation is orthogonal within blocks,
so that errors are the same before and after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...formats import Format
from ...formats.encoding import Encoding
from ...planes import ROWWISE, Direction, Plane
from .passes import BlockSums, block_sums, rotated
from .scales import ScaleStatistics, block_factors, limit_of, scale_statistics

QUANTILES = (0.5, 0.9, 0.99)
PIECE = (1, 32)  # instead of blocks, in formats with one scale for the whole tensor
_SAFE = (1e-9, 1e9)  # magnitudes whose fourth powers are far from the limits of fp32


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor, whatever it is quantized to.

    Attributes:
        amax: the largest finite magnitude.
        rms: the root of the mean square.
        kurtosis: the mean fourth power over the squared mean square: 3 for normal numbers, more with outliers.
        nan: number of NaNs.
        inf: number of infinities.
        zero_rows: rows that are all zero: padding, or tokens that do not count. They are no part of the means.
        zero_columns: columns that are all zero.
    """

    amax: float
    rms: float
    kurtosis: float | None
    nan: int
    inf: int
    zero_rows: int
    zero_columns: int


@dataclass(frozen=True)
class PlaneStatistics:
    """Statistics of a plane against the tensor that it was made from. None stands for a number that does not exist.

    Attributes:
        relative_error: norm of the error over norm of the tensor.
        snr_db: the same as a signal-to-noise ratio in decibels; None without an error.
        underflow: share of the numbers that are not zero and decode to zero.
        saturation: share of the numbers that are beyond the largest number of their scale, so that they were cut off.
        nonfinite: share of the numbers that decode to NaN or infinity.
        shrinkage: how much smaller decoded numbers are on the whole: 1 - <decoded, tensor> / <tensor, tensor>.
        block_error: quantiles of the relative error of blocks, by name: "50%", "90%", "99%", "max".
        scale_log2_min: exponent of the smallest scale of a block that is not all zero.
        scale_log2_max: exponent of the largest scale.
        scale_histogram: number of blocks by exponent of their scale.
        zero_scales: share of the blocks with numbers other than zero whose scale is zero, so that all of it is lost.
    """

    relative_error: float | None
    snr_db: float | None
    underflow: float
    saturation: float
    nonfinite: float
    shrinkage: float | None
    block_error: dict[str, float]
    scale_log2_min: int | None
    scale_log2_max: int | None
    scale_histogram: dict[int, int]
    zero_scales: float


class Operand(NamedTuple):
    """A tensor as the operand of a plane.

    Attributes:
        numbers: the operand [R, C] in fp32, times ``unit``; rotated if the format rotates.
        unit: a power of two that keeps squares away from the limits of fp32.
        rounded: the same numbers as kernels round them: rotated ones are rounded to bf16 first.
    """

    numbers: Tensor
    unit: float
    rounded: Tensor


def tensor_statistics(tensor: Tensor, sample: Tensor | None = None) -> TensorStatistics:
    """Compute the statistics of a matrix.

    Args:
        tensor: the matrix. Its amax, NaNs and infinities are those of all of it.
        sample: some of its rows, from which all else is computed; None for all rows.
    """
    amax, nan, inf = _range(tensor)
    numbers = (tensor if sample is None else sample).to(torch.float32)
    if nan or inf:
        numbers = torch.where(numbers.isfinite(), numbers, 0.0)
    unit = _unit(amax)
    if unit != 1.0:
        numbers = numbers * unit
    squares = numbers.square()
    rows, columns = squares.sum(1), squares.sum(0)
    zero_rows, zero_columns = int((rows == 0).sum()), int((columns == 0).sum())
    count = (len(rows) - zero_rows) * (len(columns) - zero_columns)
    second = float(rows.sum(dtype=torch.float64)) / max(1, count)
    fourth = float(squares.square_().sum(1).sum(dtype=torch.float64)) / max(1, count)
    return TensorStatistics(
        amax=amax,
        rms=math.sqrt(second) / unit,
        kurtosis=fourth / second**2 if second else None,
        nan=nan,
        inf=inf,
        zero_rows=zero_rows,
        zero_columns=zero_columns,
    )


def _range(tensor: Tensor) -> tuple[float, int, int]:
    """The largest finite magnitude, and the numbers of NaNs and infinities."""
    if tensor.numel() == 0:
        return 0.0, 0, 0
    low, high = (float(end) for end in torch.aminmax(tensor))
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high), 0, 0
    finite = tensor.isfinite()
    amax = float(torch.where(finite, tensor, 0.0).abs().amax())
    nan = int(tensor.isnan().sum())
    return amax, nan, int((~finite).sum()) - nan


def _unit(amax: float) -> float:
    if amax == 0 or _SAFE[0] < amax < _SAFE[1]:
        return 1.0
    return math.ldexp(1.0, -min(126, max(-126, math.frexp(amax)[1])))


def operand_of(sample: Tensor, fmt: Format, direction: Direction, amax: float) -> Operand:
    """The operand of a plane.

    Args:
        sample: the matrix, or some of its rows: whole blocks.
        fmt: the format of the plane.
        direction: its direction.
        amax: the largest finite magnitude of the matrix.
    """
    numbers = sample.to(torch.float32)
    if direction is not ROWWISE:
        numbers = numbers.t().contiguous()
    rounded = numbers
    if fmt.rotation is not None:
        numbers = rotated(numbers, fmt.rotation)
        rounded = numbers.to(torch.bfloat16).to(torch.float32)
    unit = _unit(amax)
    if unit != 1.0:
        numbers, rounded = numbers * unit, rounded * unit
    return Operand(numbers, unit, rounded)


def plane_statistics(operand: Operand, plane: Plane, encoding: Encoding) -> PlaneStatistics:
    """Compute the statistics of a plane.

    Args:
        operand: what the plane was made from.
        plane: the plane.
        encoding: how its bytes were chosen.
    """
    fmt = encoding.format
    decoded = kernels.decode_operand(plane)
    if operand.unit != 1.0:
        decoded = decoded * operand.unit
    block = fmt.block or PIECE
    factors = torch.ones(1, 1, device=decoded.device) if fmt.element is None else block_factors(plane)
    limit = limit_of(encoding) * operand.unit
    sums = block_sums(operand.numbers, operand.rounded, decoded, factors, limit, block)
    noise, nonfinite = float(sums.noise.sum()), 0.0
    if not math.isfinite(noise):  # NaNs or infinities, which have no part in the errors
        nonfinite = _share(~decoded.isfinite())
        sums = _sums_of_finite(operand, decoded, factors, limit, block)
        noise = float(sums.noise.sum())
    power = float(sums.power.sum())
    relative = math.sqrt(noise / power) if power else None
    scales = ScaleStatistics(None, None, {}, 0.0)
    if fmt.element is not None and power:
        scales = scale_statistics(factors, None if fmt.block is None else sums.power)
    return PlaneStatistics(
        relative_error=relative,
        snr_db=-20 * math.log10(relative) if relative else None,
        underflow=sums.lost / max(1, sums.nonzero),
        saturation=sums.cut / max(1, decoded.numel()),
        nonfinite=nonfinite,
        shrinkage=-sums.against / power if power else None,
        block_error=_quantiles(sums),
        scale_log2_min=scales.lowest,
        scale_log2_max=scales.highest,
        scale_histogram=scales.histogram,
        zero_scales=scales.zero,
    )


def _share(mask: Tensor) -> float:
    return int(torch.count_nonzero(mask)) / max(1, mask.numel())


def _sums_of_finite(
    operand: Operand, decoded: Tensor, factors: Tensor, limit: float, block: tuple[int, int]
) -> BlockSums:
    """The sums with an error of zero wherever the number or what it decodes to is not finite."""
    valid = (decoded - operand.numbers).isfinite()
    numbers = torch.where(valid, operand.numbers, 0.0)
    rounded = torch.where(operand.rounded.isfinite(), operand.rounded, 0.0)
    return block_sums(numbers, rounded, torch.where(valid, decoded, 0.0), factors, limit, block)


def _quantiles(sums: BlockSums) -> dict[str, float]:
    """Quantiles of the relative errors of blocks that are not all zero: the smallest with this share not above it."""
    noise, power = (part.reshape(-1).cpu().numpy() for part in (sums.noise, sums.power))
    there = power > 0
    count = int(np.count_nonzero(there))
    if not count:
        return {}
    errors = noise / np.where(there, power, 1.0)
    errors[~there] = np.inf  # they come last
    errors.sort()
    places = {f"{q:.0%}": math.ceil(q * count) - 1 for q in QUANTILES}
    return {name: math.sqrt(errors[at]) for name, at in {**places, "max": count - 1}.items()}
