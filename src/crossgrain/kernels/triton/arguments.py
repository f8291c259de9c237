"""The arguments of `encode_kernel` for targets."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..target import GroupedTarget, Target, Within

FAR = 1 << 31
"""Offsets from here on need 64 bits."""


def position(within: Within | None, width: int) -> dict[str, int]:
    """Where a matrix of ``width`` columns lies in a larger one, in which random words are counted."""
    top, left, width = within or (0, 0, width)
    return {"top": top, "left": left, "width": width}


def plane_arguments(name: str, target: Target | None) -> dict[str, Any]:
    """The arguments of the plane ``name`` ("row" or "col") for a target; those for none if it is None."""
    if target is None:
        return _arguments(name, None, 0, None, (0, 0), None, None, None)
    plane = target.plane
    codes, scales = plane.operand_codes(), plane.operand_scales()
    stride = codes.stride(0 if plane.has_whole_rows else 1)
    return _arguments(name, codes, stride, scales, scales.stride(), target.amax, target.scale, plane.amax)


def group_arguments(name: str, target: GroupedTarget | None) -> dict[str, Any]:
    """`plane_arguments` for groups of rows. Where each group begins is in the table, see `groups`."""
    if target is None:
        return plane_arguments(name, None)
    planes = target.planes
    stride = planes.shapes[0].data[-1]  # of rows, which all groups share; those of columns are in the table
    return _arguments(name, planes.data, stride, planes.scale, (0, 0), target.amax, target.scale, planes.amax)


def _arguments(
    name: str,
    codes: Tensor | None,
    code_stride: int,
    scales: Tensor | None,
    scale_strides: tuple[int, ...],
    amax: Tensor | None,
    given: Tensor | None,
    amax_out: Tensor | None,
) -> dict[str, Any]:
    """The arguments of one plane of `encode_kernel`."""
    return {
        f"{name}_codes": codes,
        f"{name}_code_stride": code_stride,
        f"{name}_scales": scales,
        f"{name}_scale_r": scale_strides[0],
        f"{name}_scale_c": scale_strides[1],
        f"{name}_amax": amax,
        f"{name}_given": given,
        f"{name}_amax_out": amax_out,
    }
