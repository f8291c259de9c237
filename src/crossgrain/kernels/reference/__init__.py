"""The reference backend: plain torch, for any device. It defines the bytes that all backends must give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...formats.encoding import Encoding
from ...planes import Plane
from ...planes.groups import PlaneGroups
from ..backend import HalfStep, Plan, Plans, Seen, StepPlan
from ..global_scale import GlobalScale, under_scale_one
from ..layout import swizzle_scales
from ..target import GroupedTarget, Target
from . import decode as _decode
from . import encode as _encode
from . import epilogue as _epilogue
from .blocks import amax
from .marks import mark


class ReferenceBackend:
    """The reference backend. It writes one plane after the other."""

    name = "reference"

    def measure(self, x: Tensor, targets: Sequence[Target]) -> list[Tensor | None]:
        return [_encode.measure(x, target) for target in targets]

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> Seen:
        for target in targets:
            _encode.encode(x, target, seed)
        return _has_nonfinite(x)

    def plan(self, x: Tensor, planes: Sequence[Plane], encodings: Sequence[Encoding], known: Plans) -> Plan | None:
        return None

    def step_plan(self, what: HalfStep) -> StepPlan | None:
        return None

    def measure_groups(self, x: Tensor, targets: Sequence[GroupedTarget]) -> list[Tensor | None]:
        return [self._measured_group_by_group(x, target) for target in targets]

    def _measured_group_by_group(self, x: Tensor, target: GroupedTarget) -> Tensor | None:
        found = [_encode.measure(rows, one) for rows, one in zip(_groups(x, target), target.by_group(), strict=True)]
        present = [amax for amax in found if amax is not None]
        return torch.cat(present) if present else None

    def encode_groups(self, x: Tensor, targets: Sequence[GroupedTarget], seeds: Sequence[int] | None) -> Seen:
        for target in targets:
            for group, (rows, one) in enumerate(zip(_groups(x, target), target.by_group(), strict=True)):
                _encode.encode(rows, one, None if seeds is None else seeds[group])
        return _has_nonfinite(x)

    def mark(self, x: Tensor, plane: Plane, seen: Seen) -> None:
        mark(x, plane, self.decode(plane, torch.float32))

    def mark_groups(self, x: Tensor, planes: PlaneGroups, seen: Seen) -> None:
        for rows, plane in zip(torch.split(x, list(planes.heights)), planes.planes, strict=True):
            self.mark(rows, plane, seen)

    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        return _decode.decode(plane, dtype)

    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor:
        decoded = _decode.decode_operand(plane)
        if workspace is None:
            return decoded
        return workspace[: decoded.numel()].view(decoded.shape).copy_(decoded)

    def decode_bf16(self, plane: Plane) -> Tensor:
        return _decode.decode_operand(under_scale_one(plane)).to(torch.bfloat16)

    def can_multiply(self, a: Plane, b: Plane) -> bool:
        return False

    def multiply(self, a: Plane, b: Plane, out: Tensor, factor: float) -> None:
        raise NotImplementedError("the reference backend cannot multiply codes: decode the operands")

    def multiply_few(self, x: Tensor, plane: Plane, out: Tensor) -> bool:
        return False

    def joint_scale(
        self, row_scale: GlobalScale | None, column_scale: GlobalScale | None, alpha: float, like: Tensor
    ) -> Tensor:
        return _epilogue.joint_scale(row_scale, column_scale, alpha, like)

    def epilogue(
        self,
        product: Tensor,
        out: Tensor,
        row_scale: GlobalScale | None,
        column_scale: GlobalScale | None,
        alpha: float,
        bias: Tensor | None,
        beta: float | None,
    ) -> None:
        _epilogue.epilogue(product, out, row_scale, column_scale, alpha, bias, beta)

    def swizzle_scales(self, scales: Tensor) -> Tensor:
        return swizzle_scales(scales)

    def amax(self, x: Tensor) -> Tensor:
        return amax(x)

    def fingerprint(self, x: Tensor) -> bytes | None:
        return None  # plain torch would take longer than quantizing again

    def tensor_scale(self, target: Target | GroupedTarget) -> Tensor:
        return _encode.tensor_scale(target).factor.view(-1)


def _has_nonfinite(x: Tensor) -> bool | None:
    """Whether there is a NaN or an infinity; None if nobody knows without waiting for the device."""
    if x.device.type != "cpu" or isinstance(x, FakeTensor):
        return None
    return not bool(x.isfinite().all())


def _groups(x: Tensor, target: GroupedTarget) -> Sequence[Tensor]:
    """The rows of each group."""
    return torch.split(x, list(target.planes.heights))
