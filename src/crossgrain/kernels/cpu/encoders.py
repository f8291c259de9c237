"""The kernels that encode targets: for which targets each is, and with which arguments it is called.

`chosen_work` tries one after the other. The backend caches what it returns, so that it does not try again for targets
of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...formats.encoding import Encoding
from ...planes import COLUMNWISE, ROWWISE
from ..target import Target
from . import columns, fp8_tiles, nvfp4_columns, nvfp4_rows, nvfp4_tiles, rows, transposed
from .known import E2M1
from .places import Ints
from .runtime import address
from .support import (
    NO_STREAM,
    Stream,
    goes_along,
    is_cast,
    is_column_run,
    is_four_over_six_rows,
    is_fp8_tiled,
    is_mxfp8_columns,
    is_mxfp8_tiled,
    is_nvfp4_columns,
    is_nvfp4_tile_rows,
    is_nvfp4_tiled_pair,
    is_row_run,
    tag,
    tag_of_dtype,
    tag_of_plane,
    yes_or_no,
)
from .tags import F32, NO, YES, Tag
from .work import FIRST, LAST, SCRATCH, Chosen, TargetSlots, Work, stream_slots

_TILE_WIDTH = 512  # columns of a tile of transposed planes
_TURNED_WIDTH = 256  # columns of a tile that is transposed in the second-level cache
_STRIP_WIDTH = 512  # columns of a strip: 32 rows of it stay in the second-level cache


class Encoder(NamedTuple):
    """A kernel for some kinds of targets.

    Attributes:
        choose: returns targets for one call of this kernel, from those that are left; None if there are none.
        work: the call that writes them, for a matrix of a dtype.
    """

    choose: Callable[[Sequence[Target]], Chosen | None]
    work: Callable[[torch.dtype, Chosen], Work]


class Run(NamedTuple):
    """The arguments of kernels for a plane whose blocks are contiguous in memory."""

    place: tuple[Any, ...]  # the kernel, bits, block; codes, scales and global scales: addresses and steps between rows
    stream: Stream


def _run(target: Target, slots: TargetSlots, dtype: Tag) -> Run:
    """The arguments for a target. ``dtype`` is what the kernel of a row reads."""
    encoding = target.encoding
    key = (id(encoding), dtype)
    found = _row_kernels.get(key)
    if found is None:
        found = _row_kernels[key] = _row_kernel(target, dtype)
    step = 4 if encoding.format.global_amax == "row" else 0
    place = (
        *found.numbers, slots.codes, slots.codes_step, slots.scales, slots.scales_step,
        slots.encode, slots.decode, step,
    )  # fmt: skip
    return Run(place, stream_slots(target, slots))


class _RowKernel(NamedTuple):
    """The kernel that encodes a row, the bits of its codes, and the length of its blocks."""

    numbers: tuple[int, int, int]
    encoding: Encoding  # its address is in the key, so it is kept alive


_row_kernels: dict[tuple[int, Tag], _RowKernel] = {}


def _row_kernel(target: Target, dtype: Tag) -> _RowKernel:
    if len(_row_kernels) >= _MOST_ROW_KERNELS:
        _row_kernels.clear()
    fmt = target.encoding.format
    assert fmt.element is not None
    tags = (dtype, tag_of_plane(target.plane), tag(fmt.scale_rule), _stochastic(target))
    numbers = (address(rows.run, *_RUN_NUMBERS, *tags), fmt.element.bits, fmt.block_length or _WHOLE)
    return _RowKernel(numbers, target.encoding)


_MOST_ROW_KERNELS = 1024
_RUN_NUMBERS = (0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0)  # by which the types of the arguments of `rows.run` are known
_WHOLE = 1 << 31  # the length of a block without end: the tensor has one scale
_NO_RUN = Run((0, 8, _WHOLE, 0, 0, 0, 0, 0, 0, 0), NO_STREAM)


def _stochastic(target: Target) -> Tag:
    return YES if target.encoding.stochastic else NO


def _beside(column: Target | None, targets: Sequence[Target]) -> Chosen | None:
    """A columnwise target, and a rowwise target that can be written in the same pass, if there is one."""
    if column is None:
        return None
    return column, next((target for target in targets if goes_along(target, column)), None)


def _run_beside(dtype: torch.dtype, row: Target | None) -> Run:
    """The arguments for the rowwise target of a pass. Without one, they say that nothing is written."""
    return _NO_RUN if row is None else _run(row, TargetSlots.of(1), tag_of_dtype(dtype))


def _first(targets: Sequence[Target], wanted: Callable[[Target], bool]) -> Target | None:
    return next((target for target in targets if wanted(target)), None)


def _one(wanted: Callable[[Target], bool]) -> Callable[[Sequence[Target]], Chosen | None]:
    """Choose one target at a time."""

    def choose(targets: Sequence[Target]) -> Chosen | None:
        found = _first(targets, wanted)
        return None if found is None else (found,)

    return choose


def _in_steps_of(rows: int) -> Callable[[Ints], Ints]:
    """The number of steps, if each has so many rows; the last one may have fewer."""
    return lambda height: -(-height // rows)


def _row_run(dtype: torch.dtype, chosen: Chosen) -> Work:
    """Encode a rowwise plane."""
    (target,) = chosen
    assert target is not None
    at, width = TargetSlots.of(0), target.plane.shape[1]
    run = _run(target, at, tag_of_dtype(dtype))
    arguments = (at.x, width * dtype.itemsize, *run.place, FIRST, LAST, width, SCRATCH, *run.stream, F32)
    return Work(rows.encode_rows, arguments, _in_steps_of(1), rows.RUN_SCRATCH)


def _column_run(dtype: torch.dtype, chosen: Chosen) -> Work:
    """Encode a columnwise plane that is stored transposed."""
    (target,) = chosen
    assert target is not None
    at, width = TargetSlots.of(0), target.plane.shape[1]
    run, strip = _run(target, at, F32), min(_TURNED_WIDTH, width)
    arguments = (
        at.x, width * dtype.itemsize, *run.place,
        FIRST, LAST, at.height, width, strip, SCRATCH, *run.stream, tag_of_dtype(dtype),
    )  # fmt: skip
    scratch = strip * transposed.PITCH + rows.RUN_SCRATCH
    return Work(transposed.encode_columns, arguments, _in_steps_of(transposed.HEIGHT), scratch)


def _cast(dtype: torch.dtype, chosen: Chosen) -> Work:
    """Encode per-tensor FP8 in the layout of the input."""
    (target,) = chosen
    assert target is not None
    at, width = TargetSlots.of(0), target.plane.shape[1]
    arguments = (at.x, at.codes, at.factor, FIRST, LAST, tag_of_dtype(dtype), tag_of_plane(target.plane), YES)
    return Work(rows.cast, arguments, lambda height: height * width)


def _choose_mxfp8_columns(targets: Sequence[Target]) -> Chosen | None:
    return _beside(_first(targets, is_mxfp8_columns), targets)


def _mxfp8_columns(dtype: torch.dtype, chosen: Chosen) -> Work:
    """Encode MXFP8 columnwise, with a rowwise plane in the same pass."""
    column, row = chosen
    assert column is not None
    at, run, width = TargetSlots.of(0), _run_beside(dtype, row), column.plane.shape[1]
    strip = min(_STRIP_WIDTH, width)
    arguments = (
        at.x, width * dtype.itemsize, at.codes, at.codes_step, at.scales, at.scales_step,
        *run.place, FIRST, LAST, width, strip, SCRATCH, *run.stream, tag_of_dtype(dtype), tag_of_plane(column.plane),
    )  # fmt: skip
    return Work(columns.mx_columns, arguments, _in_steps_of(32), 33 * strip * 4 + rows.RUN_SCRATCH)


def _choose_nvfp4_columns(targets: Sequence[Target]) -> Chosen | None:
    return _beside(_first(targets, is_nvfp4_columns), targets)


def _nvfp4_columns(dtype: torch.dtype, chosen: Chosen) -> Work:
    """Encode NVFP4 columnwise, with a rowwise plane in the same pass."""
    column, row = chosen
    assert column is not None
    at, run, fmt = TargetSlots.of(0), _run_beside(dtype, row), column.plane.format
    width = column.plane.shape[1]
    strip = width if width < 64 else min(_TILE_WIDTH, width // 32 * 32)
    arguments = (
        at.x, width * dtype.itemsize, at.codes, at.codes_step, at.scales, at.scales_step,
        at.each_encode, at.each_decode, at.each_amax, float(E2M1.max * fmt.scale_bound), *run.place,
        FIRST, LAST, at.height, width, strip, SCRATCH, *stream_slots(column, at), *run.stream,
        fmt.block != (1, 16), tag_of_dtype(dtype), tag("none" if fmt.rotation is None else str(fmt.rotation)),
        _stochastic(column), tag(column.encoding.four_over_six or "none"),
    )  # fmt: skip
    scratch = (16 * 4 + 64 + 8) * strip + rows.RUN_SCRATCH
    return Work(nvfp4_columns.columns, arguments, _in_steps_of(128), scratch, refuses_nan=True)


def _nvfp4_rows(dtype: torch.dtype, chosen: Chosen) -> Work:
    """Encode NVFP4 rowwise with a scale per 16x16 tile, or with 4-over-6."""
    (target,) = chosen
    assert target is not None
    at, fmt, width = TargetSlots.of(0), target.plane.format, target.plane.shape[1]
    arguments = (
        at.x, width * dtype.itemsize, at.codes, at.codes_step, at.scales, at.scales_step,
        at.each_encode, at.each_decode, at.each_amax, float(E2M1.max * fmt.scale_bound), FIRST, LAST, width, SCRATCH,
        *stream_slots(target, at), tag_of_dtype(dtype),
        _stochastic(target), tag(target.encoding.four_over_six or "none"),
    )  # fmt: skip
    by_rows = nvfp4_rows.tile_rows if is_nvfp4_tile_rows(target) else nvfp4_rows.block_rows
    return Work(by_rows, arguments, _in_steps_of(fmt.block_rows), nvfp4_rows.SCRATCH, refuses_nan=True)


def _choose_nvfp4_tiles(targets: Sequence[Target]) -> Chosen | None:
    """Choose two NVFP4 targets with 16x16 tiles, one in each direction, that have the same codes."""
    row = _first(targets, is_nvfp4_tile_rows)
    column = row and _first(targets, lambda target: is_nvfp4_tiled_pair(row, target))
    return (row, column) if column else None


def _nvfp4_tiles(dtype: torch.dtype, chosen: Chosen) -> Work:
    """Encode NVFP4 with a scale per 16x16 tile in both directions."""
    row, column = (TargetSlots.of(at) for at in range(2))
    width = _any(chosen).plane.shape[1]
    strip = min(_TILE_WIDTH, width)
    arguments = (
        row.x, width * dtype.itemsize, row.codes, row.codes_step, row.scales, row.scales_step,
        column.codes, column.codes_step, column.scales, column.scales_step, row.encode, row.decode,
        FIRST, LAST, row.height, width, strip, SCRATCH, tag_of_dtype(dtype),
    )  # fmt: skip
    scratch = nvfp4_tiles.scratch_bytes(strip)
    return Work(nvfp4_tiles.both, arguments, _in_steps_of(128), scratch, refuses_nan=True)


def _choose_mxfp8_tiles(targets: Sequence[Target]) -> Chosen | None:
    """Choose MXFP8 targets with 32x32 tiles, in one or both directions."""
    first = _first(targets, is_mxfp8_tiled)
    if first is None:
        return None
    return _by_direction([t for t in targets if is_mxfp8_tiled(t) and t.encoding == first.encoding])


def _mxfp8_tiles(dtype: torch.dtype, chosen: Chosen) -> Work:
    made = [target is not None for target in chosen]
    row, column = _slots_by_direction(chosen)
    plane = _any(chosen).plane
    arguments = (
        row.x, plane.shape[1] * dtype.itemsize, row.codes, column.codes,
        row.scales, row.scales_step, column.scales, column.scales_step,
        FIRST, LAST, plane.shape[1], *made, tag_of_dtype(dtype), tag_of_plane(plane),
    )  # fmt: skip
    return Work(columns.mx_tiles, arguments, _in_steps_of(32))


def _choose_fp8_tiles(targets: Sequence[Target]) -> Chosen | None:
    """Choose FP8 targets with block scales, or transposed per-tensor FP8, in one or both directions."""
    first = _first(targets, is_fp8_tiled)
    if first is None:
        return None
    return _by_direction([target for target in targets if is_fp8_tiled(target, beside=first)])


def _fp8_tiles(dtype: torch.dtype, chosen: Chosen) -> Work:
    made = [target is not None for target in chosen]
    row, column = _slots_by_direction(chosen)
    plane, encoding = _any(chosen).plane, _any(chosen).encoding
    fmt, width = plane.format, plane.shape[1]
    assert fmt.element is not None
    places = (row.x, width * dtype.itemsize, row.codes, width, column.codes, row.height)
    tags = (tag_of_dtype(dtype), tag_of_plane(plane))
    steps, scratch = _in_steps_of(fp8_tiles.SIDE), fp8_tiles.SCRATCH_BYTES
    if fmt.block is None:
        with_one_factor = (*places, FIRST, LAST, row.height, width, row.factor, SCRATCH, *made, *tags)
        return Work(fp8_tiles.whole, with_one_factor, steps, scratch)
    arguments = (
        *places, row.scales, row.scales_step, column.scales, column.scales_step, FIRST, LAST, row.height, width,
        float(encoding.epsilon), float(fmt.element.max), float(torch.finfo(dtype).max), SCRATCH,
        *made, fmt.block == (128, 128), *tags, yes_or_no(encoding.power_of_two),
    )  # fmt: skip
    return Work(fp8_tiles.tiles, arguments, steps, scratch)


def _by_direction(targets: Sequence[Target]) -> Chosen:
    """The first rowwise and the first columnwise target, which one call can write; None where there is none."""
    rows, columns = ([t for t in targets if t.plane.direction is direction] for direction in (ROWWISE, COLUMNWISE))
    return rows[0] if rows else None, columns[0] if columns else None


def _slots_by_direction(chosen: Chosen) -> tuple[TargetSlots, TargetSlots]:
    """The slots of the two directions. Those of a direction that is not made are not used: they are the other's."""
    row, column = chosen
    return TargetSlots.of(1 if row is None else 0), TargetSlots.of(0 if column is None else 1)


def _any(chosen: Chosen) -> Target:
    return next(target for target in chosen if target is not None)


ENCODERS: tuple[Encoder, ...] = (
    Encoder(_choose_nvfp4_tiles, _nvfp4_tiles),
    Encoder(_choose_nvfp4_columns, _nvfp4_columns),
    Encoder(_choose_mxfp8_columns, _mxfp8_columns),
    Encoder(_choose_mxfp8_tiles, _mxfp8_tiles),
    Encoder(_choose_fp8_tiles, _fp8_tiles),
    Encoder(_one(is_row_run), _row_run),
    Encoder(_one(is_column_run), _column_run),
    Encoder(_one(is_cast), _cast),
    Encoder(_one(lambda target: is_nvfp4_tile_rows(target) or is_four_over_six_rows(target)), _nvfp4_rows),
)
"""The order matters: kernels that write both planes come before those that write one of them."""


class Step(NamedTuple):
    """A call of a kernel, and the indices of the targets that it writes."""

    work: Work
    at: tuple[int | None, ...]


class Steps(NamedTuple):
    """What `chosen_work` has found.

    Attributes:
        steps: the calls that write the targets for which there are kernels.
        left: the indices of the targets that no kernel can write.
    """

    steps: list[Step]
    left: list[int]


def chosen_work(dtype: torch.dtype, targets: Sequence[Target]) -> Steps:
    """The calls of kernels that write ``targets``."""
    left, steps = list(targets), []
    for encoder in ENCODERS:
        while chosen := encoder.choose(left):
            at = tuple(None if target is None else _index(targets, target) for target in chosen)
            steps.append(Step(encoder.work(dtype, chosen), at))
            left = [target for target in left if not any(target is other for other in chosen)]
    return Steps(steps, [_index(targets, target) for target in left])


def _index(targets: Sequence[Target], wanted: Target) -> int:
    return next(at for at, target in enumerate(targets) if target is wanted)
