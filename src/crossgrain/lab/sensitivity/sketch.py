"""Inner products of gradients without keeping gradients: random sketches, and the statistics that follow from them.

The bias of a gradient is found from products of its errors in different batches: E<d_i, d_j> = |E d|² for i != j. That
would need the errors of all batches at once. A sketch adds numbers with random signs into a few thousand places. The
inner product of two sketches is that of the vectors, up to a relative error of about sqrt(2 / places).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..intervals import LEVEL, Estimate, estimate
from ..student import t_quantile

PLACES = 1 << 14  # an error of about 1 %


class Sketches:
    """Sketches of tensors that have names. The same name gets the same signs in every batch."""

    def __init__(self, places: int = PLACES) -> None:
        self.places = places
        self._signs: dict[str, Tensor] = {}

    def empty(self, device: torch.device) -> Tensor:
        """The sketch of zero."""
        return torch.zeros(self.places, dtype=torch.float32, device=device)

    def add(self, sketch: Tensor, name: str, values: Tensor) -> None:
        """Add a tensor to a sketch in place."""
        flat = values.reshape(-1).float() * self._signs_of(name, values)
        whole = flat.numel() // self.places * self.places
        if whole:
            sketch += flat[:whole].view(-1, self.places).sum(0)
        sketch[: flat.numel() - whole] += flat[whole:]

    def _signs_of(self, name: str, values: Tensor) -> Tensor:
        signs = self._signs.get(name)
        if signs is None:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randint(0, 2, (values.numel(),), generator=generator, dtype=torch.int8)
            signs = self._signs[name] = drawn.mul_(2).sub_(1).to(values.device)
        return signs


def inner_products(sketches: Sequence[Tensor]) -> Tensor:
    """All inner products [batches, batches], in float64."""
    stacked = torch.stack(list(sketches)).double()
    return stacked @ stacked.T


def common_part(products: Tensor) -> Estimate:
    """|E d|² from the inner products of d in different batches: their mean, with an interval by the jackknife.

    Raises:
        ValueError: there are fewer than two batches.
    """
    count = len(products)
    if count < 2:
        raise ValueError("what gradients of different batches have in common needs at least two batches")
    whole = _mean_of_pairs(products)
    if count == 2:
        return Estimate(whole, -math.inf, math.inf, count)
    without = []
    for left_out in range(count):
        kept = [at for at in range(count) if at != left_out]
        without.append(_mean_of_pairs(products[kept][:, kept]))
    mean = sum(without) / count
    error = math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in without))
    half = t_quantile((1 + LEVEL) / 2, count - 1) * error
    return Estimate(whole, whole - half, whole + half, count)


def _mean_of_pairs(products: Tensor) -> float:
    count = len(products)
    return float(products.sum() - products.diagonal().sum()) / (count * (count - 1))


def scaled(value: Estimate, factor: float) -> Estimate:
    """An estimate in another unit."""
    return Estimate(value.mean * factor, value.low * factor, value.high * factor, value.count)


def batch_variance(squares: Sequence[float], sketches: Sequence[Tensor]) -> float:
    """The variance of a batch's gradient: its mean square, minus the square of what all batches have in common.

    Args:
        squares: the squared gradient of each batch.
        sketches: its sketch.
    """
    return estimate(squares).mean - _mean_of_pairs(inner_products(sketches))
