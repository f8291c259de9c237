"""Mark NaNs and infinities in planes with kernels, see `kernels.marks`."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...formats import Format
from ...planes import Plane
from ...planes.groups import PlaneGroups
from ..backend import Seen
from ..reference.marks import has_nan, nan_scale
from .arguments import FAR
from .device.mark import mark_kernel
from .groups import group_table
from .kinds import PlaneKind
from .launch import Launcher
from .shapes import marking_tile


def can_mark(fmt: Format) -> bool:
    """Whether the mark is in a code or in the scale of a block. A scale of the tensor is that of all programs."""
    return fmt.block is not None or (has_nan(fmt) and fmt.element is not None and fmt.element.bits == 8)


def mark(launcher: Launcher, x: Tensor, plane: Plane, kind: PlaneKind, seen: Seen) -> None:
    """Mark a plane. Nothing is read if ``seen`` is a tensor that says that there is nothing to mark."""
    if isinstance(x, FakeTensor):
        return
    codes, scales = plane.operand_codes(), plane.operand_scales()
    stride = codes.stride(0 if kind.operand_major else 1)
    matrix = x.resolve_neg().reshape(plane.shape)
    _launch(launcher, matrix, kind, plane.format, seen, None, codes, stride, scales, scales.stride(), plane.amax)


def mark_groups(launcher: Launcher, x: Tensor, planes: PlaneGroups, kind: PlaneKind, seen: Seen) -> None:
    """Mark the planes of groups in one launch."""
    if not isinstance(x, FakeTensor):
        matrix = x.resolve_neg().reshape(-1, planes.width)
        _launch(launcher, matrix, kind, planes.format, seen, planes, planes.data, 0, planes.scale, (0, 0), planes.amax)


def _launch(
    launcher: Launcher,
    x: Tensor,
    kind: PlaneKind,
    fmt: Format,
    seen: Seen,
    groups: PlaneGroups | None,
    codes: Tensor,
    code_stride: int,
    scales: Tensor,
    scale_strides: tuple[int, ...],
    amax: Tensor | None,
) -> None:
    tile = marking_tile(kind)
    rows, columns = x.shape
    pair = [groups, None] if kind.rowwise else [None, groups]
    table = None if groups is None else group_table(groups.heights, columns, tile.rows, pair, x.device)
    down = -(-rows // tile.rows) if table is None else table.tiles
    known = isinstance(seen, Tensor)
    arguments = {
        "x": x,
        "x_m": x.stride(0),
        "x_k": x.stride(1),
        "M": rows,
        "K": columns,
        "groups": None if table is None else table.tile_groups,
        "table": None if table is None else table.lines,
        "nonfinite": seen if known else None,
        "codes": codes,
        "code_stride": code_stride,
        "scales": scales,
        "scale_r": scale_strides[0],
        "scale_c": scale_strides[1],
        "amax": amax,
        "PLANE": kind,
        "NAN_SCALE": 0 if kind.rule == "fp32" else int(nan_scale(fmt)),
        "BM": tile.rows,
        "BK": tile.columns,
        "KNOWN": known,
        "GROUPED": table is not None,
        "WIDE": max(tile) * max(rows, columns, code_stride, *x.stride()) >= FAR,
    }
    launcher(mark_kernel, down * -(-columns // tile.columns), x.device, tile.warps, arguments)
