"""The kernels that encode targets: for which targets each is, and how it is called.

`encode_some` tries one after the other. The backend caches the steps, so that it does not try again for targets of the
same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.encoding import Encoding
from ...planes import COLUMNWISE, ROWWISE
from ..target import Target
from . import columns, fp8_tiles, nvfp4_columns, nvfp4_rows, rows, transposed
from .elements import INFINITY_BITS
from .known import E2M1
from .places import Ints, Numbers, place_of
from .runtime import Arguments, address, run_kernel
from .support import (
    NO_STREAM,
    ONE,
    Seed,
    Stream,
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
    one_per_direction,
    scales_of_each_row,
    scratch_memory,
    stream_of,
    tag,
    tag_of_input,
    tag_of_plane,
    write_tensor_scale,
    yes_or_no,
)
from .tags import F32, NO, YES, Tag

_TILE_WIDTH = 512  # columns of a tile of transposed planes
_TURNED_WIDTH = 256  # columns of a tile that is transposed in the second-level cache
_STRIP_WIDTH = 512  # columns of a strip: 32 rows of it stay in the second-level cache


Chosen = tuple[Target | None, ...]  # the targets of one pass, in the order in which its encoder expects them


class Encoder(NamedTuple):
    """A kernel for some kinds of targets.

    Attributes:
        choose: returns targets for one pass of this kernel, from those that are left; None if there are none.
        run: writes them; returns the bits of the largest magnitude, or REFUSED if the kernel cannot encode these
            numbers.
    """

    choose: Callable[[Sequence[Target]], Chosen | None]
    run: Callable[[Tensor, Chosen, Seed], int]


REFUSED = -1


class Run(NamedTuple):
    """The arguments of kernels for a plane whose blocks are contiguous in memory."""

    place: tuple[Any, ...]  # the kernel, bits, block; codes, scales and global scales: addresses and steps between rows
    stream: Stream
    global_scales: tuple[Numbers, Numbers]  # kept alive


def _run(x: Tensor, target: Target, seed: Seed, dtype: Tag | None = None) -> Run:
    """The arguments for a target. ``dtype`` is what the kernel of a row reads; None for what ``x`` has."""
    at, encoding = place_of(target, x), target.encoding
    key = (id(encoding), dtype or tag_of_input(x))
    found = _row_kernels.get(key)
    if found is None:
        found = _row_kernels[key] = _row_kernel(target, key[1])
    encode, decode = scales = global_scales(target)
    step = 4 if encoding.format.global_amax == "row" else 0
    place = (
        *found.numbers, at.codes, at.codes_step, at.scales, at.scales_step, encode.address, decode.address, step,
    )  # fmt: skip
    return Run(place, stream_of(seed, target), scales)


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
_NO_RUN = Run((0, 8, _WHOLE, 0, 0, 0, 0, 0, 0, 0), NO_STREAM, (ONE, ONE))


def _stochastic(target: Target) -> Tag:
    return YES if target.encoding.stochastic else NO


def _beside(column: Target | None, targets: Sequence[Target]) -> Chosen | None:
    """A columnwise target, and a rowwise target that can be written in the same pass, if there is one."""
    if column is None:
        return None
    return column, next((target for target in targets if goes_along(target, column)), None)


def _run_beside(x: Tensor, row: Target | None, seed: Seed) -> Run:
    """The arguments for the rowwise target of a pass. Without one, they say that nothing is written."""
    return _NO_RUN if row is None else _run(x, row, seed)


def _first(targets: Sequence[Target], wanted: Callable[[Target], bool]) -> Target | None:
    return next((target for target in targets if wanted(target)), None)


def _one(wanted: Callable[[Target], bool]) -> Callable[[Sequence[Target]], Chosen | None]:
    """Choose one target at a time."""

    def choose(targets: Sequence[Target]) -> Chosen | None:
        found = _first(targets, wanted)
        return None if found is None else (found,)

    return choose


def _finish(target: Target | None) -> None:
    """Write what a plane has beside codes and block scales: the amax and the per-tensor scale."""
    if target is None:
        return
    if target.amax is not None:
        groups = getattr(target, "groups", None)
        amax = target.plane.amax if groups is None else groups.amax
        if amax is not None:
            amax.copy_(target.amax)
    if target.plane.format.block is None:
        write_tensor_scale(target)


def _encode_row_run(x: Tensor, chosen: Chosen, seed: Seed) -> int:
    """Encode a rowwise plane."""
    (target,) = chosen
    assert target is not None
    run, at, width = _run(x, target, seed), place_of(target, x), target.plane.shape[1]

    def arguments(first: Ints, last: Ints) -> Arguments:
        return (
            at.x, width * x.element_size(), *run.place,
            first, last, width, scratch_memory(rows.RUN_SCRATCH), *run.stream, F32,
        )  # fmt: skip

    bits = max(run_kernel(rows.encode_rows, arguments, at.height, x.numel(), chosen), default=0)
    _finish(target)
    return bits


def _encode_column_run(x: Tensor, chosen: Chosen, seed: Seed) -> int:
    """Encode a columnwise plane that is stored transposed."""
    (target,) = chosen
    assert target is not None
    run, at, width = _run(x, target, seed, dtype=F32), place_of(target, x), target.plane.shape[1]
    strip = min(_TURNED_WIDTH, width)

    def arguments(first: Ints, last: Ints) -> Arguments:
        scratch = scratch_memory(strip * transposed.PITCH + rows.RUN_SCRATCH)
        return (
            at.x, width * x.element_size(), *run.place,
            first, last, at.height, width, strip, scratch, *run.stream, tag_of_input(x),
        )  # fmt: skip

    tiles = -(-at.height // transposed.HEIGHT)
    bits = max(run_kernel(transposed.encode_columns, arguments, tiles, x.numel(), chosen), default=0)
    _finish(target)
    return bits


def _cast(x: Tensor, chosen: Chosen, seed: Seed) -> int:
    """Encode per-tensor FP8 in the layout of the input."""
    (target,) = chosen
    assert target is not None
    at, factor, element = place_of(target, x), factor_for_kernels(target), tag_of_plane(target.plane)

    def arguments(first: Ints, last: Ints) -> Arguments:
        return (at.x, at.codes, factor, first, last, tag_of_input(x), element, YES)

    bits = max(run_kernel(rows.cast, arguments, at.height * target.plane.shape[1], x.numel(), chosen), default=0)
    write_tensor_scale(target)
    return bits


def _choose_mxfp8_columns(targets: Sequence[Target]) -> Chosen | None:
    return _beside(_first(targets, is_mxfp8_columns), targets)


def _encode_mxfp8_columns(x: Tensor, chosen: Chosen, seed: Seed) -> int:
    """Encode MXFP8 columnwise, with a rowwise plane in the same pass."""
    column, row = chosen
    assert column is not None
    run = _run_beside(x, row, seed)
    at, width, element = place_of(column, x), column.plane.shape[1], tag_of_plane(column.plane)
    strip = min(_STRIP_WIDTH, width)

    def arguments(first: Ints, last: Ints) -> Arguments:
        scratch = scratch_memory(33 * strip * 4 + rows.RUN_SCRATCH)
        return (
            at.x, width * x.element_size(), at.codes, at.codes_step, at.scales, at.scales_step,
            *run.place, first, last, width, strip, scratch, *run.stream, tag_of_input(x), element,
        )  # fmt: skip

    bits = max(run_kernel(columns.mx_columns, arguments, at.height // 32, x.numel(), chosen), default=0)
    _finish(row)
    return bits


def _choose_nvfp4_columns(targets: Sequence[Target]) -> Chosen | None:
    return _beside(_first(targets, is_nvfp4_columns), targets)


def _encode_nvfp4_columns(x: Tensor, chosen: Chosen, seed: Seed) -> int:
    """Encode NVFP4 columnwise, with a rowwise plane in the same pass."""
    column, row = chosen
    assert column is not None
    run = _run_beside(x, row, seed)
    plane, at = column.plane, place_of(column, x)
    width = plane.shape[1]
    strip = width if width < 64 else min(_TILE_WIDTH, width // 32 * 32)
    encode, decode, amax = scales_of_each_row(column)
    bound = E2M1.max * plane.format.scale_bound
    stream = stream_of(seed, column)
    tags = (
        tag("none" if plane.format.rotation is None else str(plane.format.rotation)),
        _stochastic(column),
        tag(column.encoding.four_over_six or "none"),
    )

    def arguments(first: Ints, last: Ints) -> Arguments:
        scratch = scratch_memory((16 * 4 + 64 + 8) * strip + rows.RUN_SCRATCH)
        return (
            at.x, width * x.element_size(), at.codes, at.codes_step, at.scales, at.scales_step,
            encode.address, decode.address, amax.address, bound, *run.place,
            first, last, at.height, width, strip, scratch, *stream, *run.stream,
            plane.format.block != (1, 16), tag_of_input(x), *tags,
        )  # fmt: skip

    bits = max(run_kernel(nvfp4_columns.columns, arguments, -(-at.height // 128), x.numel(), chosen), default=0)
    if bits > INFINITY_BITS:
        return REFUSED
    _finish(column)
    _finish(row)
    return bits


def _encode_nvfp4_rows(x: Tensor, chosen: Chosen, seed: Seed) -> int:
    """Encode NVFP4 rowwise with a scale per 16x16 tile, or with 4-over-6."""
    (target,) = chosen
    assert target is not None
    fmt, width, at = target.plane.format, target.plane.shape[1], place_of(target, x)
    encode, decode, amax = scales_of_each_row(target)
    bound = E2M1.max * fmt.scale_bound
    stream = stream_of(seed, target)
    tags = (_stochastic(target), tag(target.encoding.four_over_six or "none"))

    def arguments(first: Ints, last: Ints) -> Arguments:
        scratch = scratch_memory(nvfp4_rows.SCRATCH)
        return (
            at.x, width * x.element_size(), at.codes, at.codes_step, at.scales, at.scales_step,
            encode.address, decode.address, amax.address, bound, first, last, width, scratch,
            *stream, tag_of_input(x), *tags,
        )  # fmt: skip

    by_rows = nvfp4_rows.tile_rows if is_nvfp4_tile_rows(target) else nvfp4_rows.block_rows
    bits = max(run_kernel(by_rows, arguments, at.height // fmt.block_rows, x.numel(), chosen), default=0)
    if bits > INFINITY_BITS:
        return REFUSED
    _finish(target)
    return bits


def _choose_mxfp8_tiles(targets: Sequence[Target]) -> Chosen | None:
    """Choose MXFP8 targets with 32x32 tiles, in one or both directions."""
    first = _first(targets, is_mxfp8_tiled)
    if first is None:
        return None
    return tuple(one_per_direction([t for t in targets if is_mxfp8_tiled(t) and t.encoding == first.encoding]))


def _encode_mxfp8_tiles(x: Tensor, chosen: Chosen, seed: Seed) -> int:
    group = [target for target in chosen if target is not None]
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

    return max(run_kernel(columns.mx_tiles, arguments, row.height // 32, x.numel(), chosen), default=0)


def _choose_fp8_tiles(targets: Sequence[Target]) -> Chosen | None:
    """Choose FP8 targets with block scales, or transposed per-tensor FP8, in one or both directions."""
    first = _first(targets, is_fp8_tiled)
    if first is None:
        return None
    return tuple(one_per_direction([target for target in targets if is_fp8_tiled(target, beside=first)]))


def _encode_fp8_tiles(x: Tensor, chosen: Chosen, seed: Seed) -> int:
    group = [target for target in chosen if target is not None]
    first = next((target for target in group if is_fp8_tiled(target)), group[0])
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

    bits = max(run_kernel(fp8_tiles.tiles, arguments, -(-row.height // fp8_tiles.SIDE), x.numel(), chosen), default=0)
    if fmt.block is None:
        for target in group:
            write_tensor_scale(target)
    return bits


ENCODERS: tuple[Encoder, ...] = (
    Encoder(_choose_nvfp4_columns, _encode_nvfp4_columns),
    Encoder(_choose_mxfp8_columns, _encode_mxfp8_columns),
    Encoder(_choose_mxfp8_tiles, _encode_mxfp8_tiles),
    Encoder(_choose_fp8_tiles, _encode_fp8_tiles),
    Encoder(_one(is_row_run), _encode_row_run),
    Encoder(_one(is_column_run), _encode_column_run),
    Encoder(_one(is_cast), _cast),
    Encoder(_one(lambda target: is_nvfp4_tile_rows(target) or is_four_over_six_rows(target)), _encode_nvfp4_rows),
)
"""The order matters: kernels that also write a rowwise plane come before those that write only rowwise planes."""


class KernelCall(NamedTuple):
    """An encoder, and the indices of the targets that it writes."""

    run: Callable[[Tensor, Chosen, Seed], int]
    at: tuple[int | None, ...]


class Encoded(NamedTuple):
    """What `encode_some` has done.

    Attributes:
        steps: the kernels that wrote something.
        left: the targets that no kernel can write.
        largest: bits of the largest magnitude that these kernels have seen.
    """

    steps: list[KernelCall]
    left: list[Target]
    largest: int


def encode_some(x: Tensor, targets: Sequence[Target], seed: Seed) -> Encoded:
    """Write the targets for which there are kernels."""
    left, steps, most = list(targets), [], 0
    for encoder in ENCODERS:
        refused: list[Target] = []
        while chosen := encoder.choose([target for target in left if not any(target is other for other in refused)]):
            bits = encoder.run(x, chosen, seed)
            if bits == REFUSED:
                refused += [target for target in chosen if target is not None]
                continue
            most = max(most, bits)
            steps.append(KernelCall(encoder.run, tuple(None if t is None else _index(targets, t) for t in chosen)))
            left = [target for target in left if not any(target is other for other in chosen)]
    return Encoded(steps, left, most)


def _index(targets: Sequence[Target], wanted: Target) -> int:
    return next(at for at, target in enumerate(targets) if target is wanted)
