"""`StepPlan`: forward or backward of a linear layer as one program: it encodes matrices and prepares their products.

A program (see `programs`) has a part for each product. The first part also encodes all matrices. The end of a part is
the product itself, if both operands are NVFP4 and this CPU multiplies their codes; otherwise both operands are decoded
to fp32 in workspaces, and the caller multiplies them, and the product by the scales of operands that have one scale for
all. Planes that nobody reads later have no tensors: they are in memory that the thread uses again for the next layer.

It gives the bytes of `plans`, `decoders` and `products`, of which it is made, with one call of compiled code for each
product instead of one for each plane.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...planes import ROWWISE, Plane
from ...planes.plane import buffer_shapes
from ..backend import HalfStep, Make, ProductOf
from ..reference.random_bits import stream_keys
from ..target import Target
from ..workspaces import LIMIT_BYTES, workspace
from . import nvfp4_product, products, programs, runtime
from .decoders import decoder
from .dot_tile import LEFT_BLOCK_BYTES, RIGHT_BLOCK_BYTES, TILE_COLUMNS, TILE_ROWS
from .elements import INFINITY_BITS
from .plans import REFUSES, lines_to_write
from .runtime import kernel, thread_count
from .support import is_plain_memory, tag_of_plane, yes_or_no
from .tables import Beyond, Given, Inside, Line, Table
from .tags import F32, NO
from .work import SCRATCH

_MOST_SCRATCH = 1 << 24  # bytes that a thread keeps for planes that have no tensors
_STREAM_FROM = 1 << 20  # see `backend`
_LINE = 16  # fp32 numbers of a cache line
_SCALES = 2  # numbers that are noted first: the scales of both operands of a product
_OF_MATRIX = 2  # numbers that are noted for each matrix: its amax, and the scale to encode with


class _View(NamedTuple):
    """How torch multiplies an operand in a workspace: the left one as it is, the right one transposed."""

    shape: tuple[int, int]
    strides: tuple[int, int]


class _Part(NamedTuple):
    """What leads to one product.

    Attributes:
        first: the first of its lines.
        last: the one after its last line.
        views: the operands; None if lines compute the product itself.
        noted: whether the operands have one scale for all, which is noted for the caller.
    """

    first: int
    last: int
    views: tuple[_View, _View] | None
    noted: bool


class _Buffers(NamedTuple):
    """What is expected of the buffers of a plane that exists already."""

    data: torch.Size
    scale: torch.Size
    scale_strides: tuple[int, ...]
    scale_dtype: torch.dtype
    amaxes: int

    def suit(self, plane: Plane) -> bool:
        data, scale, amax = plane.data, plane.scale, plane.amax
        return (
            type(data) is Tensor
            and data.shape == self.data
            and data.dtype == torch.uint8
            and data.is_contiguous()
            and data.data_ptr() != 0
            and type(scale) is Tensor
            and scale.shape == self.scale
            and scale.stride() == self.scale_strides
            and scale.dtype is self.scale_dtype
            and scale.data_ptr() != 0
            and (0 if amax is None else _numbers_at(amax)) == self.amaxes
            and not plane.stale
        )


class StepPlan:
    """Forward or backward of layers of one shape; see `kernels.step_plan`.

    Args:
        makes: the matrices that are encoded, with examples of their planes.
        given: examples of planes that exist already.
        table: the words of the program.
        lines: its lines.
        parts: its parts.
        panels: the size of each workspace in fp32 numbers.
        largest: how many numbers the largest piece of its work has, by which the number of threads is chosen.
        notes: where numbers for the caller are.
    """

    def __init__(
        self,
        makes: Sequence[Make],
        given: Sequence[Plane],
        table: Table,
        lines: Sequence[Line],
        parts: Sequence[_Part],
        panels: Sequence[int],
        largest: int,
        notes: Beyond,
    ) -> None:
        finished = table.finished(lines)
        noted = (finished.own_bytes + notes.distance) // 4
        self._notes = slice(noted, noted + _SCALES + _OF_MATRIX * len(makes))
        self._words, self._inside = finished.words, finished.inside
        self._scratch, self.scratch_bytes = finished.scratch, finished.scratch_bytes
        self._parts, self._panels = parts, [size + _LINE for size in panels]
        self._encodings = [make.encodings for make in makes]  # kept alive: kernels are found by their addresses
        self._largest = largest
        self._streams = max(panels) >= _STREAM_FROM
        self._given = [
            _Buffers(
                plane.data.shape,
                plane.scale.shape,  # type: ignore[union-attr]
                plane.scale.stride(),  # type: ignore[union-attr]
                plane.scale.dtype,  # type: ignore[union-attr]
                0 if plane.amax is None else plane.amax.numel(),
            )
            for plane in given
        ]
        at, planes = finished.given, [plane for make in makes for plane in make.planes]
        made, kept = _numbers_of(makes), [kept for make in makes for kept in make.kept]
        sources = [make.derives and number > 0 for make in makes for number in range(len(make.planes))]

        def words(kind: str, numbers: Sequence[int]) -> list[int]:
            return [word for number in numbers for word in at.get(Given(kind, number), ())]

        # In the order in which `start` finds the addresses.
        self._fills = [words("x", [number for number in numbers if not sources[number]]) for numbers in made]
        self._fills += [
            words("given", numbers) for make, numbers in zip(makes, made, strict=True) if make.scale is not None
        ]
        self._scales = [0 if make.scale is None else 1 for make in makes]
        tensors = [number for number, stays in enumerate(kept) if stays]
        tensors += range(len(planes), len(planes) + len(given))
        for number in tensors:
            kinds = ("codes", "scales", "amax") if [*planes, *given][number].amax is not None else ("codes", "scales")
            self._fills += [words(kind, [number]) for kind in kinds]
        self._fills += [words("operand", [side]) for side in range(2)]
        self._fills[-1] += words("x", [number for number, derived in enumerate(sources) if derived])
        self._fills += [words("out", [number]) for number in range(len(parts))]
        self._keys = [
            (make, planes[number].direction, words("key0", [number]), words("key1", [number]))
            for make, numbers in enumerate(made)
            for number in numbers
            if words("key0", [number])
        ]
        self._program = kernel(programs.program, 0, 0, 0, F32)

    def suits(self, matrices: Sequence[Tensor], scales: Sequence[Tensor | None], given: Sequence[Plane]) -> bool:
        """Whether these tensors have memory in the layout of the plan."""
        for matrix in matrices:
            if not is_plain_memory(matrix):
                return False
        for scale, wanted in zip(scales, self._scales, strict=True):
            if (0 if scale is None else _numbers_at(scale)) != wanted:
                return False
        for plane, needed in zip(given, self._given, strict=True):  # noqa: SIM110 - a generator is a call of Python
            if not needed.suit(plane):
                return False
        return True

    def is_for_one_thread(self) -> bool:
        """Whether no piece of the work is so large that several threads would share it. A plan runs on one."""
        return self._largest < 2 * runtime.ELEMENTS_PER_THREAD or thread_count(self._largest) == 1

    def start(
        self,
        matrices: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        kept: Sequence[Plane],
        given: Sequence[Plane],
        seeds: Sequence[int | None],
        totals: Sequence[Tensor],
    ) -> Running:
        """Fill in addresses. See `kernels.step_plan`."""
        left, right = workspace("gemm.a", self._panels[0]), workspace("gemm.b", self._panels[1])
        memory = workspace("planes", -(-self.scratch_bytes // 4))
        assert left is not None and right is not None and memory is not None  # `step_plan_for` has seen to it
        if self._streams:
            left, right = _from_line(left), _from_line(right)
        tensors = [*matrices]
        for scale in scales:
            if scale is not None:
                tensors.append(scale)
        for plane in (*kept, *given):
            tensors += (plane.data, plane.scale) if plane.amax is None else (plane.data, plane.scale, plane.amax)  # type: ignore[arg-type]
        tensors += (left, right, *totals)
        table = self._words[:]
        for words, tensor in zip(self._fills, tensors, strict=True):
            if words:
                address = tensor.data_ptr()
                for at in words:
                    table[at] = address
        for make, direction, key0, key1 in self._keys:
            keys = stream_keys(seeds[make], direction)  # type: ignore[arg-type]
            for at in key0:
                table[at] = keys[0]
            for at in key1:
                table[at] = keys[1]
        base, scratch = table.buffer_info()[0], memory.data_ptr()
        for at, distance in self._inside:
            table[at] = base + distance
        for at, distance in self._scratch:
            table[at] = scratch + distance
        return Running(self, table, (left, right), memory)


class Running:
    """Half a step that has begun. Whoever has begun it holds the tensors whose addresses it has.

    Args:
        plan: its plan.
        table: the words, with addresses.
        sides: the workspaces of the operands.
        memory: that of planes that have no tensors.
    """

    __slots__ = ("_memory", "_plan", "_sides", "_table")

    def __init__(self, plan: StepPlan, table: array[int], sides: tuple[Tensor, Tensor], memory: Tensor) -> None:
        self._plan, self._table, self._sides, self._memory = plan, table, sides, memory

    def product(self, number: int) -> tuple[Tensor, ...] | None:
        """Run a part. See `kernels.step_plan`."""
        first, last, views, noted = self._plan._parts[number]
        bits = self._plan._program(self._table.buffer_info()[0], first, last, F32)
        if not 0 <= bits < INFINITY_BITS:
            return None
        if views is None:
            return ()
        left, right = self._sides[0].as_strided(*views[0]), self._sides[1].as_strided(*views[1])
        return (left, right, self._memory[self._plan._notes]) if noted else (left, right)


# ---- making plans ----------------------------------------------------------------------------------------


def step_plan_for(what: HalfStep) -> StepPlan | None:
    """A plan for forward or backward of a layer; None if kernels cannot do everything."""
    makes, given, wanted = what
    if not wanted:
        return None
    for plane in given:
        plane.check_buffers()  # what the plan expects of later ones is taken from these
    table = Table()
    lines: list[Line] = []
    parts: list[_Part] = []
    planes = [*(plane for make in makes for plane in make.planes), *given]
    panels, largest = [0, 0], max(plane.shape[0] * plane.shape[1] for plane in planes)
    decoded: dict[int, int] = {}  # planes that are in a workspace already
    own = _with_buffers(makes)
    notes = table.beyond(_SCALES + _OF_MATRIX * len(makes))
    for place, (make, numbers) in enumerate(zip(makes, _numbers_of(makes), strict=True)):
        noting = notes.distance + 4 * (_SCALES + _OF_MATRIX * place)
        added = _written(table, make, numbers[0], wanted[0], panels, noting)
        if added is None:
            return None
        lines += added
        if make.derives and make.matrix.dtype == torch.float32:
            decoded[numbers[0]] = 1
    for number, pair in enumerate(wanted):
        first = 0 if number == 0 else len(lines)
        sides = planes[pair.left], planes[pair.right]
        at = ProductOf(own.get(pair.left, pair.left), own.get(pair.right, pair.right))
        noted = [side.format.block is None for side in sides]
        if noted[0] != noted[1]:
            return None
        if sides[0].format.scale_rule == sides[1].format.scale_rule == "two_level":
            added, views = _multiplied(table, number, at, sides, panels), None
            largest = max(largest, products.size_of(*sides))
        else:
            added, views = _decoded(table, at, sides, panels, decoded if number == 0 else {}), _views(sides)
        if added is None:
            return None
        lines += added
        if all(noted):
            lines += [
                _noting(table, Given("scales", plane), notes.distance + 4 * side) for side, plane in enumerate(at)
            ]
        parts.append(_Part(first, len(lines), views, all(noted)))
    for number, stays in enumerate([kept for make in makes for kept in make.kept]):
        if not stays and number not in own:
            _put_aside(table, number, planes[number])
    plan = StepPlan(makes, given, table, lines, parts, panels, largest, notes)
    return None if plan.scratch_bytes > _MOST_SCRATCH or (max(panels) + _LINE) * 4 > LIMIT_BYTES else plan


def _shares_buffers(make: Make) -> bool:
    """Whether the two planes of a matrix are one, read in both directions."""
    return len(make.planes) == 2 and make.planes[0].data is make.planes[1].data


def _with_buffers(makes: Sequence[Make]) -> dict[int, int]:
    """For planes that share buffers with the plane after them: the number of that one, by which addresses are given."""
    numbers = zip(makes, _numbers_of(makes), strict=True)
    return {first: first + 1 for make, (first, *_) in numbers if _shares_buffers(make)}


def _noting(table: Table, number: Given | Inside | Beyond, distance: int) -> Line:
    """What copies a number to where the caller finds it: so many bytes from the beginning of what has no owner."""
    return table.line(programs.note, (number, Beyond(distance), F32))


def _written(
    table: Table, make: Make, first: int, wanted: ProductOf, panels: list[int], notes: int
) -> list[Line] | None:
    """What encodes a matrix, and notes its amax and its scale if it has one scale for all.

    With ``derives``, its second plane is encoded from the first one, after decoding.
    """
    targets = [Target(plane, how, scale=make.scale) for plane, how in zip(make.planes, make.encodings, strict=True)]
    zeros = [
        table.line(programs.zeros, (Given("scales", number), _bytes(plane.scale), F32))
        for number, (plane, kept) in enumerate(zip(make.planes, make.kept, strict=True), first)
        if kept and buffer_shapes(plane.format, plane.direction, plane.shape, plane.transposed).pads
    ]
    if not make.derives:
        if _shares_buffers(make):
            targets, first = targets[:1], first + 1
        found = lines_to_write(table, make.matrix, targets, first)
        if found is None:
            return None
        seen = []
        if found.scale is not None and found.measured is not None:
            seen.append(_noting(table, Inside(found.measured.result), notes))
            seen.append(_noting(table, found.scale, notes + 4))
        return [*zeros, *found.lines, *seen]
    rows = lines_to_write(table, make.matrix, targets[:1], first)
    decodes = _decoded_source(table, make, first, wanted, panels)
    columns = lines_to_write(table, make.matrix, targets[1:], first + 1)
    if rows is None or decodes is None or columns is None:
        return None
    return [*zeros, *rows.lines, decodes, *columns.lines]


def _decoded_source(table: Table, make: Make, first: int, wanted: ProductOf, panels: list[int]) -> Line | None:
    """What decodes the first plane, for the second one to be made of it.

    In fp32 it is the right operand of the product as well. In bf16 it has a place of its own.
    """
    plane, dtype = make.planes[0], make.matrix.dtype
    if plane.format.block is None:
        return None  # `_decoding` leaves its scale to the caller
    if dtype == torch.float32:
        return _decoding(table, plane, first, 1, panels) if first == wanted.right else None
    how = decoder(plane, dtype) if plane.format.global_amax is None else None
    if how is None:
        return None
    place = table.beyond(-(-_bytes(make.matrix) // 4))
    line = table.line(how.kernel, (*how.arguments(_addresses(first), place, 0, how.steps), *how.tags, NO))  # type: ignore[arg-type]
    table.places[Given("x", first + 1)] = place
    return line


def _decoded(
    table: Table, pair: ProductOf, sides: Sequence[Plane], panels: list[int], done: dict[int, int]
) -> list[Line] | None:
    """What decodes the operands of a product."""
    found = [
        _decoding(table, plane, number, side, panels)
        for side, (number, plane) in enumerate(zip(pair, sides, strict=True))
        if done.get(number) != side
    ]
    return None if None in found else found  # type: ignore[return-value]


def _decoding(table: Table, plane: Plane, number: int, side: int, panels: list[int]) -> Line | None:
    """What decodes a plane to a workspace: without its scale, if it has one for all, which the caller applies."""
    fmt, how = plane.format, decoder(plane, torch.float32)
    if how is None or fmt.global_amax is not None or fmt.rotation is not None:
        return None  # left to `gemm`
    height, width = how.shape
    past_caches = height * width >= _STREAM_FROM and width % _LINE == 0
    panels[side] = max(panels[side], height * width)
    out = Given("operand", side)
    if how.flat:
        arguments: tuple[Any, ...] = (Given("codes", number), out, 1.0, 0, how.steps)
    else:
        arguments = how.arguments(_addresses(number), out, 0, how.steps)  # type: ignore[arg-type]
    return table.line(how.kernel, (*arguments, *how.tags, yes_or_no(past_caches)))


def _addresses(number: int) -> Any:
    """In the place of a plane: its addresses are known when the program runs."""

    def at(kind: str) -> Any:
        return SimpleNamespace(data_ptr=lambda: Given(kind, number))

    return SimpleNamespace(data=at("codes"), scale=at("scales"), amax=at("amax"))


def _views(sides: Sequence[Plane]) -> tuple[_View, _View]:
    (left_shape, left_strides), (right_shape, right_strides) = (_operand_view(plane) for plane in sides)
    return _View(left_shape, left_strides), _View(right_shape[::-1], right_strides[::-1])


def _operand_view(plane: Plane) -> _View:
    rows, inner = plane.operand_shape
    stored_by_rows = plane.direction is ROWWISE or plane.transposed
    return _View((rows, inner), (inner, 1) if stored_by_rows else (1, rows))


def _multiplied(
    table: Table, number: int, pair: ProductOf, sides: Sequence[Plane], panels: list[int]
) -> list[Line] | None:
    """What multiplies the codes of two operands, as `products.multiply` does."""
    left, right = sides
    if not products.can_multiply(left, right) or any(plane.format.global_amax != "tensor" for plane in sides):
        return None
    (rows, inner), columns = left.operand_shape, right.operand_shape[0]
    blocks, tag = inner // 16, tag_of_plane(left)
    kinds = (
        (nvfp4_product.pack_left, TILE_ROWS, LEFT_BLOCK_BYTES),
        (nvfp4_product.pack_right, TILE_COLUMNS, RIGHT_BLOCK_BYTES),
    )
    packs = []
    for side, ((pack, tile, size), at, plane) in enumerate(zip(kinds, pair, sides, strict=True)):
        height = plane.operand_shape[0]
        tiles = -(-height // tile)
        panels[side] = max(panels[side], -(-tiles * blocks * size // 4))
        assert plane.scale is not None
        arguments: tuple[Any, ...] = (
            Given("codes", at), inner // 2, Given("scales", at), plane.scale.stride(0),
            products.scale_values().data_ptr(), Given("operand", side), 0, tiles, height, blocks, tag,
        )  # fmt: skip
        packs.append(table.line(pack, arguments))
    arguments = (
        Given("operand", 0), Given("operand", 1), Given("out", number), columns * 4, 0, -(-columns // TILE_COLUMNS),
        rows, columns, blocks, products.rows_together(blocks), 0.0, SCRATCH, tag,
    )  # fmt: skip
    multiply = table.line(nvfp4_product.multiply, arguments, scratch=TILE_ROWS * TILE_COLUMNS * 4)
    factor = Inside(multiply.arguments + arguments.index(0.0, 9))
    bounds = [float(plane.format.element.max * plane.format.scale_bound) for plane in sides]  # type: ignore[union-attr]
    amaxes = [Given("amax", at) for at in pair]
    joint = table.line(programs.joint_factor, (*amaxes, factor, *bounds, F32), limit=REFUSES)
    return [joint, *packs, multiply]


def _put_aside(table: Table, number: int, plane: Plane) -> None:
    """Give a plane that nobody keeps its place in scratch memory."""
    for kind, buffer in {"codes": plane.data, "scales": plane.scale, "amax": plane.amax}.items():
        if buffer is not None:
            table.places[Given(kind, number)] = table.beyond(-(-_bytes(buffer) // 4))


def _numbers_of(makes: Sequence[Make]) -> list[range]:
    """The numbers of the planes of each matrix."""
    found, next_one = [], 0
    for make in makes:
        found.append(range(next_one, next_one + len(make.planes)))
        next_one += len(make.planes)
    return found


def _bytes(buffer: Tensor | None) -> int:
    return 0 if buffer is None else buffer.numel() * buffer.element_size()


def _from_line(memory: Tensor) -> Tensor:
    """Memory from the next beginning of a cache line on, where what is written past the caches must begin."""
    beyond = memory.data_ptr() % (4 * _LINE) // 4
    return memory[_LINE - beyond :] if beyond else memory


def _numbers_at(buffer: Tensor) -> int:
    """How many fp32 numbers are in memory; -1 if it is not like that."""
    plain = (
        type(buffer) is Tensor
        and buffer.is_cpu
        and buffer.dtype == torch.float32
        and buffer.is_contiguous()
        and not buffer.is_neg()
        and buffer.data_ptr() != 0
    )
    return buffer.numel() if plain else -1
