"""Decode planes with kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...formats import Format
from ...planes import ROWWISE, Plane
from .arguments import FAR
from .device.decode import decode_kernel
from .kinds import PlaneKind, plane_kind
from .launch import Launcher
from .shapes import decoding_tile
from .traits import Traits


def readable_kind(plane: Plane, traits: Traits) -> PlaneKind | None:
    """The kind of a plane that kernels can decode; None for others."""
    if plane.format.is_identity or not plane.data.numel() or not has_usual_codes(plane):
        return None
    if plane.amax is not None and not plane.amax.is_contiguous():
        return None
    return plane_kind(plane.format, plane.direction, plane.has_whole_rows, traits)


def has_usual_codes(plane: Plane) -> bool:
    """Whether codes can be read and written in words of 4 bytes, one next to the other."""
    if plane.format.element is None:
        return False
    codes = plane.operand_codes()
    along = codes.stride(1 if plane.has_whole_rows else 0)
    return along == 1 and has_whole_words(plane.format, codes)


def has_whole_words(fmt: Format, codes: Tensor) -> bool:
    """Whether codes of 4 bits, which are written in words of 4 bytes, begin at such words in all rows."""
    if fmt.element is None or fmt.element.bits != 4:
        return True
    return codes.storage_offset() % 4 == 0 and (codes.dim() < 2 or codes.stride(0) % 4 == 0)


def decoded(launcher: Launcher, plane: Plane, kind: PlaneKind, dtype: torch.dtype) -> Tensor:
    """The matrix [M, K]. A rotation is undone."""
    out = torch.empty(plane.shape, dtype=dtype, device=plane.data.device)
    operand = out if plane.direction is ROWWISE else out.t()
    _decode(launcher, plane, kind, operand, unrotate=kind.rotation >= 0)
    return out


def decoded_operand(
    launcher: Launcher,
    plane: Plane,
    kind: PlaneKind,
    dtype: torch.dtype,
    workspace: Tensor | None = None,
    *,
    with_global_scale: bool = True,
) -> Tensor:
    """The operand [R, C], in the order in which its codes are stored. A rotation is not undone."""
    shape = plane.operand_shape if kind.operand_major else plane.shape
    if workspace is None:
        out = torch.empty(shape, dtype=dtype, device=plane.data.device)
    else:
        out = workspace[: shape[0] * shape[1]].view(shape)
    operand = out if kind.operand_major else out.t()
    _decode(launcher, plane, kind, operand, with_global_scale=with_global_scale)
    return operand


def _decode(
    launcher: Launcher,
    plane: Plane,
    kind: PlaneKind,
    out: Tensor,
    *,
    with_global_scale: bool = True,
    unrotate: bool = False,
) -> None:
    if isinstance(plane.data, FakeTensor):
        return
    rows, length = plane.operand_shape
    codes, scales = plane.operand_codes(), plane.operand_scales()
    tile = decoding_tile(kind)
    launcher(
        decode_kernel,
        -(-rows // tile.rows) * -(-length // tile.columns),
        plane.data.device,
        tile.warps,
        {
            "codes": codes,
            "code_stride": codes.stride(0 if kind.operand_major else 1),
            "scales": scales,
            "scale_r": scales.stride(0),
            "scale_c": scales.stride(1),
            "amax": plane.amax,
            "out": out,
            "out_r": out.stride(0),
            "out_c": out.stride(1),
            "R": rows,
            "C": length,
            "PLANE": kind,
            "GLOBAL": with_global_scale,
            "UNROTATE": unrotate,
            "BR": tile.rows,
            "BC": tile.columns,
            "WIDE": max(tile.rows, tile.columns) * max(rows, length, *codes.stride(), *out.stride()) >= FAR,
        },
    )
