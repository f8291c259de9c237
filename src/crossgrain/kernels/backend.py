"""What a backend offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..plane import Plane
from .target import Target


class Backend(Protocol):
    """What a backend offers. ``targets`` of one call share the input, so one pass may fill several."""

    name: str

    def measure(self, x: Tensor, targets: Sequence[Target]) -> list[Tensor | None]: ...
    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> None: ...
    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor: ...
    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor: ...
    def can_multiply(self, a: Plane, b: Plane) -> bool: ...
    def multiply(self, a: Plane, b: Plane, out: Tensor, factor: float) -> None: ...
    def amax(self, x: Tensor) -> Tensor: ...
    def tensor_scale(self, target: Target) -> Tensor: ...
