"""The kernels that encode targets. Each function takes the targets it has one for and returns the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import E2M1
from ...plane import COLUMNWISE, ROWWISE, bytes_per_row
from ..target import Target
from . import columns, fp8_tiles, nvfp4_columns, nvfp4_rows, rows, transposed
from .runtime import kernel, run_ranges
from .support import (
    Numbers,
    global_scales,
    goes_along,
    is_cast,
    is_column_run,
    is_four_over_six_rows,
    is_fp8_tiled,
    is_mxfp8_columns,
    is_mxfp8_tiled,
    is_nvfp4_columns,
    is_nvfp4_tile_rows,
    is_row_run,
    keys_of,
    numbers,
    one_per_direction,
    reciprocal,
    row_bytes,
    scales_of,
    scratch_memory,
    tag_of_input,
    tag_of_plane,
    tensor_factor,
    yes_or_no,
)
from .tags import YES, Tag

_TILE_WIDTH = 512  # columns of a tile of the transposed planes
_TURNED_WIDTH = 256  # columns of a tile that is turned in the second-level cache
_STRIP_WIDTH = 512  # columns of a strip: 32 rows of them stay in the second-level cache


@dataclass(frozen=True)
class Run:
    """A plane whose blocks are runs in memory, as kernels are told about it."""

    place: tuple[int, ...]  # of codes, scales and global scales: addresses and steps from row to row
    keys: tuple[int, int]
    tags: tuple[Tag, Tag, Tag]  # element, scale rule, stochastic
    global_scales: tuple[Numbers, Numbers]  # kept alive


def _run(target: Target, seed: int | None, rule: str | None = None) -> Run:
    plane, fmt = target.plane, target.plane.format
    encode, decode = scales = global_scales(target)
    place = (
        plane.data.data_ptr(), bytes_per_row(fmt, plane.operand_shape[1]),
        scales_of(plane).data_ptr(), row_bytes(scales_of(plane)),
        encode.address, decode.address, 4 if fmt.global_amax == "row" else 0,
    )  # fmt: skip
    tags = (tag_of_plane(plane), Tag(rule or fmt.scale_rule), yes_or_no(target.encoding.stochastic))
    return Run(place, keys_of(seed, target), tags, scales)


def _run_beside(column: Target, targets: list[Target], seed: int | None) -> tuple[Target | None, Run]:
    """A rowwise target to be written in the same pass; none is a run that writes nothing."""
    row = next((target for target in targets if goes_along(target, column)), None)
    return row, _run(column, seed, rule="none") if row is None else _run(row, seed)


def _finish(target: Target | None) -> None:
    """What a plane has but its codes and block scales."""
    if target is None:
        return
    if target.plane.amax is not None and target.amax is not None:
        target.plane.amax.copy_(target.amax)
    if target.plane.format.block is None:
        scales_of(target.plane).fill_(reciprocal(tensor_factor(target)))


def _parted(targets: list[Target], wanted: Callable[[Target], bool]) -> tuple[list[Target], list[Target]]:
    mine = [target for target in targets if wanted(target)]
    return mine, [target for target in targets if target not in mine] if mine else targets


def encode_rows(x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
    """Rowwise planes, one after the other."""
    mine, others = _parted(targets, is_row_run)
    for target in mine:
        _encode_row_run(x, target, _run(target, seed))
    return others


def _encode_row_run(x: Tensor, target: Target, run: Run) -> None:
    height, width = target.plane.shape

    def work(first: int, last: int) -> None:
        arguments = (
            x.data_ptr(), width * x.element_size(), *run.place,
            first, last, width, scratch_memory(rows.RUN_SCRATCH), *run.keys, tag_of_input(x), *run.tags,
        )  # fmt: skip
        kernel(rows.encode_rows, *arguments)(*arguments)

    run_ranges(work, height, x.numel())
    _finish(target)


def encode_columns(x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
    """Columnwise planes that are stored transposed, one after the other."""
    mine, others = _parted(targets, is_column_run)
    for target in mine:
        _encode_column_run(x, target, _run(target, seed))
    return others


def _encode_column_run(x: Tensor, target: Target, run: Run) -> None:
    height, width = target.plane.shape
    strip = min(_TURNED_WIDTH, width)

    def work(first: int, last: int) -> None:
        scratch = scratch_memory(strip * transposed.PITCH + rows.RUN_SCRATCH)
        arguments = (
            x.data_ptr(), width * x.element_size(), *run.place,
            first, last, height, width, strip, scratch, *run.keys, tag_of_input(x), *run.tags,
        )  # fmt: skip
        kernel(transposed.encode_columns, *arguments)(*arguments)

    run_ranges(work, -(-height // transposed.HEIGHT), x.numel())
    _finish(target)


def encode_casts(x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
    """Per-tensor FP8 that is stored as the input is."""
    mine, others = _parted(targets, is_cast)
    for target in mine:
        _cast(x, target)
    return others


def _cast(x: Tensor, target: Target) -> None:
    plane, factor = target.plane, tensor_factor(target)

    def work(first: int, last: int) -> None:
        place = (x.data_ptr(), plane.data.data_ptr())
        arguments = (*place, factor, first, last, tag_of_input(x), tag_of_plane(plane), YES)
        kernel(rows.cast, *arguments)(*arguments)

    run_ranges(work, x.numel(), x.numel())
    scales_of(plane).fill_(reciprocal(factor))


def encode_mxfp8_columns(x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
    """MXFP8 columnwise, with a rowwise plane in the same pass."""
    column = next((target for target in targets if is_mxfp8_columns(target)), None)
    if column is None:
        return targets
    row, run = _run_beside(column, targets, seed)
    plane = column.plane
    height, width = plane.shape
    strip = min(_STRIP_WIDTH, width)

    def work(first: int, last: int) -> None:
        scratch = scratch_memory(33 * strip * 4 + rows.RUN_SCRATCH)
        arguments = (
            x.data_ptr(), width * x.element_size(),
            plane.data.data_ptr(), width, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
            *run.place, first, last, width, strip, scratch, *run.keys,
            tag_of_input(x), tag_of_plane(plane), *run.tags,
        )  # fmt: skip
        kernel(columns.mx_columns, *arguments)(*arguments)

    run_ranges(work, height // 32, x.numel())
    _finish(row)
    return [target for target in targets if target is not column and target is not row]


def encode_nvfp4_columns(x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
    """NVFP4 columnwise, with a rowwise plane in the same pass."""
    column = next((target for target in targets if is_nvfp4_columns(target)), None)
    if column is None:
        return targets
    row, run = _run_beside(column, targets, seed)
    plane = column.plane
    height, width = plane.shape
    strip = width if width < 64 else max(w for w in range(32, _TILE_WIDTH + 1, 32) if w <= width)
    spread, bound = _for_each_row(column)
    rotation = Tag("none" if plane.format.rotation is None else str(plane.format.rotation))

    def work(first: int, last: int) -> bool:
        scratch = scratch_memory((16 * 4 + 64 + 8) * strip + rows.RUN_SCRATCH)
        arguments = (
            x.data_ptr(), width * x.element_size(),
            plane.data.data_ptr(), height // 2, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
            *(scale.address for scale in spread), bound, *run.place,
            first, last, height, width, strip, scratch, *keys_of(seed, column), *run.keys,
            plane.format.block_rows > 1,
            tag_of_input(x), rotation, yes_or_no(column.encoding.stochastic), _four_over_six(column), *run.tags,
        )  # fmt: skip
        return bool(kernel(nvfp4_columns.columns, *arguments)(*arguments))

    if not all(run_ranges(work, -(-height // 128), x.numel())):
        return targets
    _finish(column)
    _finish(row)
    return [target for target in targets if target is not column and target is not row]


def _for_each_row(target: Target) -> tuple[list[Numbers], float]:
    """Global scales and amax, one for each row of the operand, and the largest product of code and block scale."""
    fmt, rows_ = target.plane.format, target.plane.operand_shape[0]
    assert target.amax is not None
    amax = Numbers(target.amax.contiguous()) if target.amax.numel() > 1 else numbers(target.amax.item())
    spread = [scale.for_each_of(rows_) for scale in (*global_scales(target), amax)]
    return spread, E2M1.max * fmt.scale_bound


def _four_over_six(target: Target) -> Tag:
    return Tag(target.encoding.four_over_six or "none")


def encode_nvfp4_rows(x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
    """NVFP4 rowwise with a scale per 16x16 tile, or with 4-over-6."""
    return [target for target in targets if not _encode_nvfp4_rows(x, target, seed)]


def _encode_nvfp4_rows(x: Tensor, target: Target, seed: int | None) -> bool:
    tiled = is_nvfp4_tile_rows(target)
    if not tiled and not is_four_over_six_rows(target):
        return False
    plane = target.plane
    height, width = plane.shape
    spread, bound = _for_each_row(target)

    def work(first: int, last: int) -> bool:
        scratch = scratch_memory(nvfp4_rows.SCRATCH)
        arguments = (
            x.data_ptr(), width * x.element_size(),
            plane.data.data_ptr(), width // 2, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
            *(scale.address for scale in spread), bound, first, last, width, scratch,
            *keys_of(seed, target), tag_of_input(x), yes_or_no(target.encoding.stochastic), _four_over_six(target),
        )  # fmt: skip
        return bool(kernel(nvfp4_rows.tile_rows if tiled else nvfp4_rows.block_rows, *arguments)(*arguments))

    if not all(run_ranges(work, height // plane.format.block_rows, x.numel())):
        return False
    _finish(target)
    return True


def encode_mxfp8_tiles(x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
    """MXFP8 with 32x32 tiles, in one or both directions."""
    group = [target for target in targets if is_mxfp8_tiled(target)]
    if not group:
        return targets
    group = one_per_direction([target for target in group if target.encoding == group[0].encoding])
    planes = {target.plane.direction: target.plane for target in group}
    first_plane = group[0].plane
    row, column = planes.get(ROWWISE, first_plane), planes.get(COLUMNWISE, first_plane)
    height, width = first_plane.shape

    def work(first: int, last: int) -> None:
        arguments = (
            x.data_ptr(), width * x.element_size(), row.data.data_ptr(), column.data.data_ptr(),
            scales_of(row).data_ptr(), scales_of(row).stride(0),
            scales_of(column).data_ptr(), scales_of(column).stride(0),
            first, last, width, ROWWISE in planes, COLUMNWISE in planes, tag_of_input(x), tag_of_plane(first_plane),
        )  # fmt: skip
        kernel(columns.mx_tiles, *arguments)(*arguments)

    run_ranges(work, height // 32, x.numel())
    return [target for target in targets if target not in group]


def encode_fp8_tiles(x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
    """FP8 with block scales, or transposed per-tensor FP8, in one or both directions."""
    first = next((target for target in targets if is_fp8_tiled(target)), None)
    if first is None:
        return targets
    group = one_per_direction([t for t in targets if is_fp8_tiled(t, beside=first)])
    row = next((t.plane for t in group if t.plane.direction is ROWWISE), None)
    column = next((t.plane for t in group if t.plane.direction is COLUMNWISE), None)
    fmt, encoding = first.plane.format, first.encoding
    assert fmt.element is not None
    height, width = first.plane.shape
    factor = tensor_factor(first) if fmt.block is None else 1.0
    largest_code = fmt.element.max
    to_row, to_column = row or first.plane, column or first.plane

    def work(begin: int, end: int) -> None:
        scratch = scratch_memory(fp8_tiles.SCRATCH_BYTES)
        arguments = (
            x.data_ptr(), width * x.element_size(),
            to_row.data.data_ptr(), width, to_column.data.data_ptr(), height,
            scales_of(to_row).data_ptr(), row_bytes(scales_of(to_row)),
            scales_of(to_column).data_ptr(), row_bytes(scales_of(to_column)),
            begin, end, height, width, factor, float(encoding.epsilon), largest_code,
            float(torch.finfo(x.dtype).max), scratch,
            row is not None, column is not None, fmt.block == (1, 128), fmt.block == (128, 128),
            tag_of_input(x), tag_of_plane(first.plane), yes_or_no(encoding.power_of_two),
        )  # fmt: skip
        kernel(fp8_tiles.tiles, *arguments)(*arguments)

    run_ranges(work, -(-height // fp8_tiles.SIDE), x.numel())
    if fmt.block is None:
        scales_of(first.plane).fill_(reciprocal(factor))
        for target in group:
            scales_of(target.plane).copy_(scales_of(first.plane))
    return [target for target in targets if target not in group]


Encoder = Callable[[Tensor, list[Target], int | None], list[Target]]

ENCODERS: tuple[Encoder, ...] = (
    encode_nvfp4_columns,
    encode_mxfp8_columns,
    encode_mxfp8_tiles,
    encode_fp8_tiles,
    encode_rows,
    encode_columns,
    encode_casts,
    encode_nvfp4_rows,
)
"""In this order: what can take a rowwise plane along comes before what encodes rowwise planes alone."""
