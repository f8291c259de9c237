"""The kernels that encode targets. Each function takes the targets it has one for and returns the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...planes import COLUMNWISE, ROWWISE
from ..target import Target
from . import columns, fp8_tiles, nvfp4_columns, nvfp4_rows, rows, transposed
from .known import E2M1
from .places import Ints, Numbers, buffers_of, place_of
from .runtime import Arguments, run_kernel
from .support import (
    Seed,
    factor_for_kernels,
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
    one_per_direction,
    scales_of_each_row,
    scratch_memory,
    tag_of_input,
    tag_of_plane,
    write_tensor_scale,
    yes_or_no,
)
from .tags import YES, Tag

_TILE_WIDTH = 512  # columns of a tile of the transposed planes
_TURNED_WIDTH = 256  # columns of a tile that is turned in the second-level cache
_STRIP_WIDTH = 512  # columns of a strip: 32 rows of them stay in the second-level cache


@dataclass(frozen=True)
class Run:
    """A plane whose blocks are runs in memory, as kernels are told about it."""

    place: tuple[Ints, ...]  # of codes, scales and global scales: addresses and steps from row to row
    keys: tuple[Ints, Ints]
    tags: tuple[Tag, Tag, Tag]  # element, scale rule, stochastic
    global_scales: tuple[Numbers, Numbers]  # kept alive


def _run(x: Tensor, target: Target, seed: Seed, rule: str | None = None) -> Run:
    plane, fmt, at = target.plane, target.plane.format, place_of(target, x)
    encode, decode = scales = global_scales(target)
    step = 4 if fmt.global_amax == "row" else 0
    place = (at.codes, at.codes_step, at.scales, at.scales_step, encode.address, decode.address, step)
    tags = (tag_of_plane(plane), Tag(rule or fmt.scale_rule), yes_or_no(target.encoding.stochastic))
    return Run(place, keys_of(seed, target), tags, scales)


def _run_beside(x: Tensor, column: Target, targets: list[Target], seed: Seed) -> tuple[Target | None, Run]:
    """A rowwise target to be written in the same pass; none is a run that writes nothing."""
    row = next((target for target in targets if goes_along(target, column)), None)
    return row, _run(x, column, seed, rule="none") if row is None else _run(x, row, seed)


def _finish(target: Target | None) -> None:
    """What a plane has but its codes and block scales."""
    if target is None:
        return
    amax = buffers_of(target).amax
    if amax is not None and target.amax is not None:
        amax.copy_(target.amax)
    if target.plane.format.block is None:
        write_tensor_scale(target)


def _parted(targets: list[Target], wanted: Callable[[Target], bool]) -> tuple[list[Target], list[Target]]:
    mine = [target for target in targets if wanted(target)]
    return mine, [target for target in targets if target not in mine] if mine else targets


def encode_rows(x: Tensor, targets: list[Target], seed: Seed) -> list[Target]:
    """Rowwise planes, one after the other."""
    mine, others = _parted(targets, is_row_run)
    for target in mine:
        _encode_row_run(x, target, _run(x, target, seed))
    return others


def _encode_row_run(x: Tensor, target: Target, run: Run) -> None:
    at, width = place_of(target, x), target.plane.shape[1]

    def arguments(first: Ints, last: Ints) -> Arguments:
        return (
            at.x, width * x.element_size(), *run.place,
            first, last, width, scratch_memory(rows.RUN_SCRATCH), *run.keys, tag_of_input(x), *run.tags,
        )  # fmt: skip

    run_kernel(rows.encode_rows, arguments, at.height, x.numel())
    _finish(target)


def encode_columns(x: Tensor, targets: list[Target], seed: Seed) -> list[Target]:
    """Columnwise planes that are stored transposed, one after the other."""
    mine, others = _parted(targets, is_column_run)
    for target in mine:
        _encode_column_run(x, target, _run(x, target, seed))
    return others


def _encode_column_run(x: Tensor, target: Target, run: Run) -> None:
    at, width = place_of(target, x), target.plane.shape[1]
    strip = min(_TURNED_WIDTH, width)

    def arguments(first: Ints, last: Ints) -> Arguments:
        scratch = scratch_memory(strip * transposed.PITCH + rows.RUN_SCRATCH)
        return (
            at.x, width * x.element_size(), *run.place,
            first, last, at.height, width, strip, scratch, *run.keys, tag_of_input(x), *run.tags,
        )  # fmt: skip

    run_kernel(transposed.encode_columns, arguments, -(-at.height // transposed.HEIGHT), x.numel())
    _finish(target)


def encode_casts(x: Tensor, targets: list[Target], seed: Seed) -> list[Target]:
    """Per-tensor FP8 that is stored as the input is."""
    mine, others = _parted(targets, is_cast)
    for target in mine:
        _cast(x, target)
    return others


def _cast(x: Tensor, target: Target) -> None:
    at, factor = place_of(target, x), factor_for_kernels(target)

    def arguments(first: Ints, last: Ints) -> Arguments:
        return (at.x, at.codes, factor, first, last, tag_of_input(x), tag_of_plane(target.plane), YES)

    run_kernel(rows.cast, arguments, at.height * target.plane.shape[1], x.numel())
    write_tensor_scale(target)


def encode_mxfp8_columns(x: Tensor, targets: list[Target], seed: Seed) -> list[Target]:
    """MXFP8 columnwise, with a rowwise plane in the same pass."""
    column = next((target for target in targets if is_mxfp8_columns(target)), None)
    if column is None:
        return targets
    row, run = _run_beside(x, column, targets, seed)
    at, width = place_of(column, x), column.plane.shape[1]
    strip = min(_STRIP_WIDTH, width)

    def arguments(first: Ints, last: Ints) -> Arguments:
        scratch = scratch_memory(33 * strip * 4 + rows.RUN_SCRATCH)
        return (
            at.x, width * x.element_size(), at.codes, at.codes_step, at.scales, at.scales_step,
            *run.place, first, last, width, strip, scratch, *run.keys,
            tag_of_input(x), tag_of_plane(column.plane), *run.tags,
        )  # fmt: skip

    run_kernel(columns.mx_columns, arguments, at.height // 32, x.numel())
    _finish(row)
    return [target for target in targets if target is not column and target is not row]


def encode_nvfp4_columns(x: Tensor, targets: list[Target], seed: Seed) -> list[Target]:
    """NVFP4 columnwise, with a rowwise plane in the same pass."""
    column = next((target for target in targets if is_nvfp4_columns(target)), None)
    if column is None:
        return targets
    row, run = _run_beside(x, column, targets, seed)
    plane, at = column.plane, place_of(column, x)
    width = plane.shape[1]
    strip = width if width < 64 else max(w for w in range(32, _TILE_WIDTH + 1, 32) if w <= width)
    spread, bound = scales_of_each_row(column), E2M1.max * plane.format.scale_bound
    rotation = Tag("none" if plane.format.rotation is None else str(plane.format.rotation))

    def arguments(first: Ints, last: Ints) -> Arguments:
        scratch = scratch_memory((16 * 4 + 64 + 8) * strip + rows.RUN_SCRATCH)
        return (
            at.x, width * x.element_size(), at.codes, at.codes_step, at.scales, at.scales_step,
            *(scale.address for scale in spread), bound, *run.place,
            first, last, at.height, width, strip, scratch, *keys_of(seed, column), *run.keys,
            plane.format.block_rows > 1,
            tag_of_input(x), rotation, yes_or_no(column.encoding.stochastic), _four_over_six(column), *run.tags,
        )  # fmt: skip

    if not all(run_kernel(nvfp4_columns.columns, arguments, -(-at.height // 128), x.numel())):
        return targets
    _finish(column)
    _finish(row)
    return [target for target in targets if target is not column and target is not row]


def _four_over_six(target: Target) -> Tag:
    return Tag(target.encoding.four_over_six or "none")


def encode_nvfp4_rows(x: Tensor, targets: list[Target], seed: Seed) -> list[Target]:
    """NVFP4 rowwise with a scale per 16x16 tile, or with 4-over-6."""
    return [target for target in targets if not _encode_nvfp4_rows(x, target, seed)]


def _encode_nvfp4_rows(x: Tensor, target: Target, seed: Seed) -> bool:
    tiled = is_nvfp4_tile_rows(target)
    if not tiled and not is_four_over_six_rows(target):
        return False
    fmt, width, at = target.plane.format, target.plane.shape[1], place_of(target, x)
    spread, bound = scales_of_each_row(target), E2M1.max * fmt.scale_bound

    def arguments(first: Ints, last: Ints) -> Arguments:
        scratch = scratch_memory(nvfp4_rows.SCRATCH)
        return (
            at.x, width * x.element_size(), at.codes, at.codes_step, at.scales, at.scales_step,
            *(scale.address for scale in spread), bound, first, last, width, scratch,
            *keys_of(seed, target), tag_of_input(x), yes_or_no(target.encoding.stochastic), _four_over_six(target),
        )  # fmt: skip

    by_rows = nvfp4_rows.tile_rows if tiled else nvfp4_rows.block_rows
    if not all(run_kernel(by_rows, arguments, at.height // fmt.block_rows, x.numel())):
        return False
    _finish(target)
    return True


def encode_mxfp8_tiles(x: Tensor, targets: list[Target], seed: Seed) -> list[Target]:
    """MXFP8 with 32x32 tiles, in one or both directions."""
    group = [target for target in targets if is_mxfp8_tiled(target)]
    if not group:
        return targets
    group = one_per_direction([target for target in group if target.encoding == group[0].encoding])
    plane = group[0].plane
    width = plane.shape[1]
    places = {target.plane.direction: place_of(target, x) for target in group}
    row, column = (places.get(direction) or next(iter(places.values())) for direction in (ROWWISE, COLUMNWISE))

    def arguments(first: Ints, last: Ints) -> Arguments:
        return (
            row.x, width * x.element_size(), row.codes, column.codes,
            row.scales, row.scales_step, column.scales, column.scales_step,
            first, last, width, ROWWISE in places, COLUMNWISE in places, tag_of_input(x), tag_of_plane(plane),
        )  # fmt: skip

    run_kernel(columns.mx_tiles, arguments, row.height // 32, x.numel())
    return [target for target in targets if target not in group]


def encode_fp8_tiles(x: Tensor, targets: list[Target], seed: Seed) -> list[Target]:
    """FP8 with block scales, or transposed per-tensor FP8, in one or both directions."""
    first = next((target for target in targets if is_fp8_tiled(target)), None)
    if first is None:
        return targets
    group = one_per_direction([t for t in targets if is_fp8_tiled(t, beside=first)])
    places = {target.plane.direction: place_of(target, x) for target in group}
    row, column = (places.get(direction) or next(iter(places.values())) for direction in (ROWWISE, COLUMNWISE))
    fmt, encoding = first.plane.format, first.encoding
    assert fmt.element is not None
    width = first.plane.shape[1]
    factor = factor_for_kernels(first) if fmt.block is None else 1.0
    largest_code = fmt.element.max

    def arguments(begin: Ints, end: Ints) -> Arguments:
        scratch = scratch_memory(fp8_tiles.SCRATCH_BYTES)
        return (
            row.x, width * x.element_size(), row.codes, width, column.codes, row.height,
            row.scales, row.scales_step, column.scales, column.scales_step,
            begin, end, row.height, width, factor, float(encoding.epsilon), largest_code,
            float(torch.finfo(x.dtype).max), scratch,
            ROWWISE in places, COLUMNWISE in places, fmt.block == (1, 128), fmt.block == (128, 128),
            tag_of_input(x), tag_of_plane(first.plane), yes_or_no(encoding.power_of_two),
        )  # fmt: skip

    run_kernel(fp8_tiles.tiles, arguments, -(-row.height // fp8_tiles.SIDE), x.numel())
    if fmt.block is None:
        for target in group:
            write_tensor_scale(target)
    return [target for target in targets if target not in group]


Encoder = Callable[[Tensor, list[Target], Seed], list[Target]]

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
