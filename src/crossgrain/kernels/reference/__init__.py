"""The reference backend: plain torch, any device, written to be read next to the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...plane import Plane
from ..target import Target
from . import decode as _decode
from . import encode as _encode
from .blocks import amax


class ReferenceBackend:
    """Every plane by itself, step by step."""

    name = "reference"

    def measure(self, x: Tensor, targets: Sequence[Target]) -> list[Tensor | None]:
        return [_encode.measure(x, target) for target in targets]

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> None:
        for target in targets:
            _encode.encode(x, target, seed)

    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        return _decode.decode(plane, dtype)

    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor:
        decoded = _decode.decode_operand(plane)
        if workspace is None:
            return decoded
        return workspace[: decoded.numel()].view(decoded.shape).copy_(decoded)

    def can_multiply(self, a: Plane, b: Plane) -> bool:
        return False

    def multiply(self, a: Plane, b: Plane, out: Tensor, factor: float) -> None:
        raise NotImplementedError("the reference decodes operands and leaves products to torch")

    def amax(self, x: Tensor) -> Tensor:
        return amax(x)

    def tensor_scale(self, target: Target) -> Tensor:
        return _encode.tensor_scale(target).factor.view(1)
