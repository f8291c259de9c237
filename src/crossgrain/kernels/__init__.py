"""How bytes are made and read. Nothing above this layer touches bits.

A backend fills planes (`measure`, then `encode`) and reads them (`decode`, `decode_operand`). Backends
are chosen by device type; each must match the reference bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..planes import Plane, shape_problem
from .backend import Backend
from .choice import REFERENCE, backend_for, get_backend, serving, set_backend
from .layout import swizzle_scales, unswizzle_scales
from .target import GroupedTarget, Target
from .transpose import transposed_plane
from .workspaces import free_workspaces, workspace

__all__ = [
    "REFERENCE",
    "Backend",
    "GroupedTarget",
    "Target",
    "amax",
    "can_multiply",
    "check_targets",
    "decode",
    "decode_operand",
    "encode",
    "encode_groups",
    "free_workspaces",
    "get_backend",
    "measure",
    "measure_groups",
    "multiply",
    "set_backend",
    "swizzle_scales",
    "tensor_scale",
    "transposed_plane",
    "unswizzle_scales",
    "workspace",
]


def _backend(tensor: Tensor) -> Backend:
    return serving.get(tensor.device.type) or backend_for(tensor.device.type)


def measure(x: Tensor, targets: Sequence[Target], *, checked: bool = False) -> list[Target]:
    """The targets with the global amax of ``x`` filled in, for those that need one and have none.

    ``checked``: the planes are known to fit ``x``, for instance because they were just made for it.
    """
    _refuse_flush_to_zero()
    if not checked:
        check_targets(x, targets)
    ready = list(targets)
    missing = [at for at, target in enumerate(ready) if target.amax is None and target.encoding.needs_amax]
    if missing:
        found = _backend(x).measure(x, [ready[at] for at in missing])
        for at, amax in zip(missing, found, strict=True):
            target = ready[at]
            ready[at] = Target(target.plane, target.encoding, amax, target.scale)
    return ready


def measure_groups(x: Tensor, targets: Sequence[GroupedTarget]) -> list[GroupedTarget]:
    """The same for groups of rows: an amax for each group."""
    _refuse_flush_to_zero()
    ready = list(targets)
    missing = [at for at, target in enumerate(ready) if target.amax is None and target.needs_amax]
    found = _backend(x).measure_groups(x, [ready[at] for at in missing])
    for at, amax in zip(missing, found, strict=True):
        ready[at] = ready[at].with_amax(amax)
    return ready


def encode(x: Tensor, targets: Sequence[Target], seed: int | None = None, *, checked: bool = False) -> None:
    """Write ``x`` into every target's plane. Targets have been through `measure`."""
    _refuse_flush_to_zero()
    if not checked:
        check_targets(x, targets)
        for target in targets:
            fmt = target.encoding.format
            if target.amax is None and target.needs_amax:
                raise ValueError(f"the amax of a {fmt.name} target has to be measured before it is encoded")
            if target.encoding.stochastic and seed is None:
                raise ValueError(f"stochastic rounding to {fmt.name} needs a seed")
    _backend(x).encode(x, targets, seed)


def encode_groups(x: Tensor, targets: Sequence[GroupedTarget], seeds: Sequence[int] | None) -> None:
    """`encode` of groups of rows, to planes that were made for them: the bytes that each group would get alone.

    ``seeds``, one for each group, if a target rounds stochastically.
    """
    _refuse_flush_to_zero()
    _backend(x).encode_groups(x, targets, seeds)


def decode(plane: Plane, dtype: torch.dtype) -> Tensor:
    """The matrix [M, K] that a plane stands for."""
    _check_readable(plane)
    return _backend(plane.data).decode(plane, dtype)


def decode_operand(plane: Plane, workspace: Tensor | None = None) -> Tensor:
    """The fp32 GEMM operand of a plane: [M, K] rowwise, [K, M] columnwise (rotated if the format is).

    ``workspace``, an fp32 buffer of as many elements or more, is written to instead of fresh memory, where
    page faults would cost several times what decoding does (see `workspaces`).
    """
    _check_readable(plane)
    if workspace is not None and not (
        workspace.dtype == torch.float32
        and workspace.is_contiguous()
        and workspace.dim() == 1
        and workspace.numel() >= plane.shape[0] * plane.shape[1]
    ):
        raise ValueError(
            f"a workspace for a plane of {list(plane.shape)} is a contiguous float32 vector of that size or more, "
            f"not {workspace.dtype} {list(workspace.shape)}"
        )
    return _backend(plane.data).decode_operand(plane, workspace)


def can_multiply(a: Plane, b: Plane) -> bool:
    """Whether the product of two operands is computed from their codes, without decoding them."""
    return a.data.device == b.data.device and _backend(a.data).can_multiply(a, b)


def multiply(a: Plane, b: Plane, out: Tensor, factor: float = 1.0) -> None:
    """``out`` = ``factor`` · a · bᵀ for operands [rows, summed] that `can_multiply`; ``out`` is fp32.

    Only block scales are applied: what the amaxes stand for belongs into ``factor``, or is applied later.
    """
    _check_readable(a, b)
    _backend(a.data).multiply(a, b, out, factor)


def _check_readable(*planes: Plane) -> None:
    _refuse_flush_to_zero()
    for plane in planes:
        plane.check_readable()
        plane.check_buffers()


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of ``x``, NaNs aside: fp32 [1]."""
    _refuse_flush_to_zero()
    return _backend(x).amax(x)


def tensor_scale(target: Target | GroupedTarget) -> Tensor:
    """The encode scale of a per-tensor format whose amax has been measured: fp32 [1], or one for each group."""
    assert target.amax is not None
    return _backend(target.amax).tensor_scale(target)


def check_targets(x: Tensor, targets: Sequence[Target]) -> None:
    """Raise unless the planes fit ``x`` and their encodings."""
    for target in targets:
        plane, fmt = target.plane, target.encoding.format
        plane.check_buffers()
        if plane.format != fmt:
            raise ValueError(f"a {plane.direction.value} plane of {plane.format.name} cannot take {fmt.name}")
        problem = shape_problem(fmt, plane.direction, plane.shape)
        if x.numel() != plane.shape[0] * plane.shape[1]:
            problem = f"the input has the shape {list(x.shape)}"
        if problem:
            raise ValueError(f"a {plane.direction.value} {fmt.name} plane of {list(plane.shape)}: {problem}")


_SMALLEST = 5e-324


def _refuse_flush_to_zero() -> None:
    """Scales and products may be subnormal; flushed to zero they would be silently wrong."""
    if _SMALLEST * 2.0 == 0.0:
        raise RuntimeError(
            "flush-to-zero is on (torch.set_flush_denormal(True)): quantization scales may be subnormal "
            "numbers and would become 0. Call torch.set_flush_denormal(False) around crossgrain."
        )
