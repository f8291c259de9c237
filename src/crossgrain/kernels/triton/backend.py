"""The Triton backend: kernels for what they can be made for, and the reference for everything else.

Both give the same bytes. No function waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...formats import Format
from ...planes import ROWWISE, Direction, Plane
from ...planes.groups import PlaneGroups
from ...runtime.random_numbers import seeds_for_device
from ..backend import Seen
from ..global_scale import GlobalScale
from ..reference import ReferenceBackend
from ..target import GroupedTarget, Target
from .arguments import FAR, group_arguments, plane_arguments, position
from .device.encode import encode_kernel
from .device.measure import amax_kernel
from .finishing import finish, joint_scale, swizzled
from .groups import GroupTable, group_table
from .kinds import EncodingKind, encoding_kind
from .launch import Launcher, launch
from .marking import can_mark, mark, mark_groups
from .reading import decoded, decoded_operand, has_usual_codes, has_whole_words, readable_kind
from .shapes import Tile, encoding_tile, measuring_tile
from .traits import Traits, device_traits

_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


_AnyTarget = TypeVar("_AnyTarget", Target, GroupedTarget)


class _Writing(NamedTuple, Generic[_AnyTarget]):
    """A target, and how kernels write it."""

    target: _AnyTarget
    kind: EncodingKind


class TritonBackend(ReferenceBackend):
    """The backend for GPUs.

    Args:
        launcher: runs kernels.
        traits: conversion instructions that kernels may use; None to ask the device of each tensor.
    """

    name = "triton"

    def __init__(self, launcher: Launcher = launch, traits: Traits | None = None) -> None:
        self._launcher = launcher
        self._traits = traits

    # ---- encoding ------------------------------------------------------------------------------

    def measure(self, x: Tensor, targets: Sequence[Target]) -> list[Tensor | None]:
        whole: list[Tensor] = []  # one, for all targets that need the amax of the tensor as it is
        found: list[Tensor | None] = []
        for target in targets:
            if _needs_amaxes_of_rotated_rows(target.plane.format):
                found += super().measure(x, [target])
            else:
                found.append(self._measured(x, target.plane, None, whole))
        return found

    def measure_groups(self, x: Tensor, targets: Sequence[GroupedTarget]) -> list[Tensor | None]:
        whole: list[Tensor] = []
        found: list[Tensor | None] = []
        for target in targets:
            planes = target.planes
            if _needs_amaxes_of_rotated_rows(planes.format):
                found += super().measure_groups(x, [target])
                continue
            matrix = Plane(planes.format, planes.direction, (sum(planes.heights), planes.width), planes.data)
            found.append(self._measured(x, matrix, planes.heights, whole))
        return found

    def _measured(self, x: Tensor, plane: Plane, heights: tuple[int, ...] | None, whole: list[Tensor]) -> Tensor | None:
        fmt = plane.format
        of_tensor = fmt.global_amax == "tensor" or (fmt.block is None and not fmt.is_identity)
        if of_tensor and fmt.rotation is None:
            if not whole:
                whole.append(self._amax(x, plane.shape, heights))
            return whole[0].clone()
        if fmt.global_amax is None:
            return None
        if fmt.global_amax == "row":
            return self._amax(x, plane.shape, heights, of=plane.direction)
        return self._amax(x, plane.shape, heights, rotation=fmt.rotation, direction=plane.direction)

    def amax(self, x: Tensor) -> Tensor:
        if x.is_contiguous() and x.numel() % 512 == 0:
            shape = (x.numel() // 512, 512)
        else:
            shape = (x.numel() // x.shape[-1], x.shape[-1]) if x.dim() and x.numel() else (1, x.numel())
        return self._amax(x, shape, None)

    def _amax(
        self,
        x: Tensor,
        shape: tuple[int, int],
        heights: tuple[int, ...] | None,
        *,
        of: Direction | None = None,
        rotation: int | None = None,
        direction: Direction = ROWWISE,
    ) -> Tensor:
        """The amax of the tensor or of each group, or with ``of`` of each row of the operands of that direction."""
        groups = 1 if heights is None else len(heights)
        count = groups if of is None else shape[0] if of is ROWWISE else groups * shape[1]
        out = torch.zeros(count, dtype=torch.int32, device=x.device)
        if x.numel() and not isinstance(x, FakeTensor):
            if x.dtype not in _INPUTS:
                x = x.to(torch.float32)
            matrix = x.resolve_neg().reshape(shape)
            tile = measuring_tile(rotation is not None)
            table = None if heights is None else group_table(heights, shape[1], tile.rows, [None, None], x.device)
            self._run(
                amax_kernel,
                matrix,
                tile,
                table,
                out=out,
                OF="tensor" if of is None else "row" if of is ROWWISE else "column",
                ROTATION=-1 if rotation is None else rotation,
                ROWWISE=direction is ROWWISE,
                COMPILED=self._traits_of(x).compiled,
            )
        return out.view(torch.float32)

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> Seen:
        kinds = [self._kind(x, target) for target in targets]
        left = [target for target, kind in zip(targets, kinds, strict=True) if kind is None]
        if left:
            super().encode(x, left, seed)
        ours = [_Writing(target, kind) for target, kind in zip(targets, kinds, strict=True) if kind is not None]
        if ours and not isinstance(x, FakeTensor):
            matrix = x.resolve_neg().reshape(ours[0].target.plane.shape)
            seeds = None if seed is None else seeds_for_device([seed], x.device)
            nonfinite = _flag([each.kind for each in ours], x)
            for row, column in _pairs(ours):
                self._write(matrix, row, column, seeds, nonfinite)
            return None if left else nonfinite
        return None

    def _kind(self, x: Tensor, target: Target) -> EncodingKind | None:
        if x.dtype not in _INPUTS or not x.numel() or not _is_usual(target):
            return None
        return encoding_kind(target, x.dtype, self._traits_of(x))

    def _write(
        self,
        x: Tensor,
        row: _Writing[Target] | None,
        column: _Writing[Target] | None,
        seeds: Tensor | None,
        nonfinite: Tensor | None,
    ) -> None:
        tile = encoding_tile(row and row.kind, column and column.kind)
        within = next(each.target.within for each in (row, column) if each is not None)
        self._run(
            encode_kernel,
            x,
            tile,
            None,
            seeds=seeds,
            nonfinite=nonfinite,
            WATCH=nonfinite is not None,
            **position(within, x.shape[1]),
            **plane_arguments("row", row and row.target),
            **plane_arguments("col", column and column.target),
            ROW=row and row.kind,
            COLUMN=column and column.kind,
            ALIGNED=False,
            EVEN=x.shape[0] % 32 == 0 and x.shape[1] % 32 == 0,
        )

    def encode_groups(self, x: Tensor, targets: Sequence[GroupedTarget], seeds: Sequence[int] | None) -> Seen:
        kinds = [self._kind_of_groups(x, target) for target in targets]
        left = [target for target, kind in zip(targets, kinds, strict=True) if kind is None]
        if left:
            super().encode_groups(x, left, seeds)
        ours = [_Writing(target, kind) for target, kind in zip(targets, kinds, strict=True) if kind is not None]
        if ours and not isinstance(x, FakeTensor):
            matrix = x.resolve_neg().reshape(-1, ours[0].target.planes.width)
            nonfinite = _flag([each.kind for each in ours], x)
            for row, column in _pairs(ours):
                self._write_groups(matrix, row, column, seeds, nonfinite)
            return None if left else nonfinite
        return None

    def _kind_of_groups(self, x: Tensor, target: GroupedTarget) -> EncodingKind | None:
        planes = target.planes
        if x.dtype not in _INPUTS or not x.numel() or not has_whole_words(planes.format, planes.data):
            return None
        shape = (x.numel() // planes.width, planes.width)
        plane = Plane(planes.format, planes.direction, shape, planes.data, transposed=planes.transposed)
        one = Target(plane, target.encoding, None, target.scale, target.within)
        return encoding_kind(one, x.dtype, self._traits_of(x))

    def _write_groups(
        self,
        x: Tensor,
        row: _Writing[GroupedTarget] | None,
        column: _Writing[GroupedTarget] | None,
        seeds: Sequence[int] | None,
        nonfinite: Tensor | None,
    ) -> None:
        tile = encoding_tile(row and row.kind, column and column.kind)
        target = next(each.target for each in (row, column) if each is not None)
        heights, width = target.planes.heights, target.planes.width
        pair = [row and row.target.planes, column and column.target.planes]
        table = group_table(heights, width, tile.rows, pair, x.device)
        self._run(
            encode_kernel,
            x,
            tile,
            table,
            seeds=None if seeds is None else seeds_for_device(seeds, x.device),
            nonfinite=nonfinite,
            WATCH=nonfinite is not None,
            **position(target.within, width),
            **group_arguments("row", row and row.target),
            **group_arguments("col", column and column.target),
            ROW=row and row.kind,
            COLUMN=column and column.kind,
            ALIGNED=table.aligned and x.stride(0) % 16 == 0,
            EVEN=all(n % 32 == 0 for n in (*heights, width)),
        )

    def _run(self, kernel: Any, x: Tensor, tile: Tile, table: GroupTable | None, **arguments: Any) -> None:
        rows, columns = x.shape
        down = -(-rows // tile.rows) if table is None else table.tiles
        strides = [value for name, value in arguments.items() if name.endswith("_code_stride")]
        self._launcher(
            kernel,
            down * -(-columns // tile.columns),
            x.device,
            tile.warps,
            {
                "x": x,
                "x_m": x.stride(0),
                "x_k": x.stride(1),
                "M": rows,
                "K": columns,
                "groups": None if table is None else table.tile_groups,
                "table": None if table is None else table.lines,
                **arguments,
                "BM": tile.rows,
                "BK": tile.columns,
                "GROUPED": table is not None,
                "WIDE": max(tile.rows, tile.columns) * max(*x.stride(), rows, columns, *strides) >= FAR,
            },
        )

    def mark(self, x: Tensor, plane: Plane, seen: Seen) -> None:
        kind = readable_kind(plane, self._traits_of(plane.data))
        if kind is None or x.dtype not in _INPUTS or not can_mark(plane.format):
            super().mark(x, plane, seen)
        else:
            mark(self._launcher, x, plane, kind, seen)

    def mark_groups(self, x: Tensor, planes: PlaneGroups, seen: Seen) -> None:
        filled = next((plane for plane in planes.planes if plane.data.numel()), None)  # a group may have no rows
        kind = None if filled is None else readable_kind(filled, self._traits_of(x))
        if kind is None or x.dtype not in _INPUTS or not can_mark(planes.format):
            super().mark_groups(x, planes, seen)
        else:
            mark_groups(self._launcher, x, planes, kind, seen)

    # ---- decoding ------------------------------------------------------------------------------

    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        kind = readable_kind(plane, self._traits_of(plane.data))
        if kind is None or dtype not in _INPUTS:
            return super().decode(plane, dtype)
        return decoded(self._launcher, plane, kind, dtype)

    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor:
        kind = readable_kind(plane, self._traits_of(plane.data))
        if kind is None:
            return super().decode_operand(plane, workspace)
        return decoded_operand(self._launcher, plane, kind, torch.float32, workspace)

    def decode_bf16(self, plane: Plane) -> Tensor:
        kind = readable_kind(plane, self._traits_of(plane.data))
        if kind is None:
            return super().decode_bf16(plane)
        return decoded_operand(self._launcher, plane, kind, torch.bfloat16, with_global_scale=False)

    # ---- GEMMs ---------------------------------------------------------------------------------

    def joint_scale(
        self, row_scale: GlobalScale | None, column_scale: GlobalScale | None, alpha: float, like: Tensor
    ) -> Tensor:
        return joint_scale(self._launcher, row_scale, column_scale, alpha, like)

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
        compiled = self._traits_of(product).compiled
        finish(self._launcher, compiled, product, out, row_scale, column_scale, alpha, bias, beta)

    def swizzle_scales(self, scales: Tensor) -> Tensor:
        return swizzled(self._launcher, scales)

    def _traits_of(self, x: Tensor) -> Traits:
        return device_traits(x.device) if self._traits is None else self._traits


def _flag(kinds: Sequence[EncodingKind], x: Tensor) -> Tensor | None:
    """A flag for a NaN or an infinity in ``x``, if planes may lose them."""
    if not any(kind.watch for kind in kinds):
        return None
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def _pairs(
    ours: Sequence[_Writing[_AnyTarget]],
) -> list[tuple[_Writing[_AnyTarget] | None, _Writing[_AnyTarget] | None]]:
    """A rowwise and a columnwise target for each pass, as far as there are both."""
    rows = [each for each in ours if each.kind.plane.rowwise]
    columns = [each for each in ours if not each.kind.plane.rowwise]
    pairs: list[tuple[_Writing[_AnyTarget] | None, _Writing[_AnyTarget] | None]] = []
    while rows or columns:
        row, column = rows.pop(0) if rows else None, columns.pop(0) if columns else None
        if row is not None and column is not None and row.target.within != column.target.within:
            pairs += [(row, None), (None, column)]
        else:
            pairs.append((row, column))
    return pairs


def _needs_amaxes_of_rotated_rows(fmt: Format) -> bool:
    """Whether there is an amax for each rotated row, which no kernel measures: no built-in format has them."""
    return fmt.global_amax == "row" and fmt.rotation is not None


def _is_usual(target: Target) -> bool:
    """Whether kernels can write a target: its codes are aligned, and it has as many amaxes as its format says."""
    kind, needed = target.encoding.format.global_amax, 1
    if kind == "row":
        needed = target.plane.operand_shape[0]
    amaxes = () if kind is None else (target.amax, target.plane.amax)
    if not all(amax is not None and amax.numel() == needed and amax.is_contiguous() for amax in amaxes):
        return False
    return has_usual_codes(target.plane)
