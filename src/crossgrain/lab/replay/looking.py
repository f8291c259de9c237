"""Look at all quantized operands of a step: which there are, what quantizing did to them, where NaNs come up first."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import kernels
from ...linear.raised import QuantizedOperand
from ...nn.attention.heads import decoded_heads
from .outcome import percent, plain

_BEYOND = 1.1  # numbers that are larger than the largest one of the plane, by more than rounding, were cut off


class Site(NamedTuple):
    """An operand of a GEMM of a layer. Its text is a rule of a recipe without its format."""

    layer: str
    operand: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.operand}"


@dataclass
class Rounding:
    """What quantizing did to an operand.

    Attributes:
        format: the format of the plane.
        largest: the largest magnitude before; NaNs and infinities aside.
        largest_after: the largest magnitude after.
        numbers: how many numbers there are.
        cut_off: how many were larger than all numbers of the plane.
        lost: how many became 0.
        nonfinite: how many were NaN or infinite before.
    """

    format: str
    largest: float = 0.0
    largest_after: float = 0.0
    numbers: int = 0
    cut_off: int = 0
    lost: int = 0
    nonfinite: int = 0
    _square: float = 0.0
    _error_square: float = 0.0

    @property
    def error(self) -> float:
        """The norm of the error over the norm of the tensor."""
        return math.sqrt(self._error_square / self._square) if self._square > 0 else 0.0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Count another tensor, such as that of another expert."""
        finite = before.isfinite()
        sane = before.where(finite, 0.0)
        after = after.where(finite & after.isfinite(), 0.0)
        limit = float(after.abs().max()) if after.numel() else 0.0
        self.largest = max(self.largest, float(sane.abs().max()) if sane.numel() else 0.0)
        self.largest_after = max(self.largest_after, limit)
        self.numbers += before.numel()
        self.cut_off += int((sane.abs() > _BEYOND * limit).sum()) if limit > 0 else 0
        self.lost += int(((after == 0) & (sane != 0)).sum())
        self.nonfinite += int((~finite).sum())
        self._square += float(sane.double().square().sum())
        self._error_square += float((sane.double() - after.double()).square().sum())

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        shown = {name: plain(value) for name, value in vars(self).items() if not name.startswith("_")}
        return {**shown, "error": plain(self.error)}

    def __str__(self) -> str:
        parts = [f"relative error {self.error:.3g}"]
        if self.cut_off:
            parts.insert(0, f"{percent(self.cut_off / self.numbers)} of its numbers were cut off")
        if self.lost > self.numbers / 100:
            parts.insert(0, f"{percent(self.lost / self.numbers)} of its numbers became 0")
        if self.nonfinite:
            parts.insert(0, f"{self.nonfinite} of its {self.numbers} numbers are NaN or infinite")
        change = f"its largest number {self.largest:.3g} became {self.largest_after:.3g}"
        return f"{change}; {', '.join(parts)}"


class Look:
    """Chooses no operand, and notes all of them, in the order in which they are first seen.

    Attributes:
        sites: what was seen that can be raised, and what quantizing did to it.
        fixed: what was seen that cannot be raised, and why.
        first_nonfinite: the first operand that has NaNs or infinities, and whether it had them before it was quantized.
    """

    def __init__(self) -> None:
        self.sites: dict[Site, Rounding] = {}
        self.fixed: dict[Site, str] = {}
        self.first_nonfinite: tuple[Site, bool] | None = None
        self._lock = threading.Lock()

    def __call__(self, operand: QuantizedOperand) -> bool:
        site = Site(operand.layer, operand.name)
        with self._lock, torch.no_grad():
            if operand.original is None:
                self.fixed[site] = operand.reason
                return False
            before = operand.original.float()
            after = (
                decoded_heads(operand.plane, before.shape)
                if before.dim() == 4
                else kernels.decode(operand.plane, torch.float32)
            )
            self.sites.setdefault(site, Rounding(operand.plane.format.name)).add(before, after)
            if self.first_nonfinite is None:
                was_there = not bool(before.isfinite().all())
                if was_there or not bool(after.isfinite().all()):
                    self.first_nonfinite = site, was_there
        return False
