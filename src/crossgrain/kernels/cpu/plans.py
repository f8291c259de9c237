"""`Plan`: how matrices of one shape and dtype are measured and encoded, with everything but the addresses.

A plan is the table of a program (see `programs`). A call copies the table, writes the addresses of the matrix and of
its planes into it, and runs it: one compiled call measures, determines global scales and encodes all planes. A plan is
for new planes, whose amaxes are those of the matrix. All other work goes through `work.run_work`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...planes import Direction, Plane
from ..reference.random_bits import stream_keys
from ..target import Target
from . import measure, programs, runtime, scalars, support
from .elements import INFINITY_BITS
from .encoders import Step, chosen_work
from .places import Place, place_of
from .programs import REFUSED
from .runtime import kernel, run_ranges, thread_count
from .support import SIXTH, from_bits, is_standard, scratch, tag, tag_of_dtype
from .tables import NO_LIMIT, Beyond, Given, Inside, Line, Table
from .tags import F32, NO
from .work import FIRST, LAST, SCRATCH, Slot

_GIVEN = ("x", "codes", "scales", "key0", "key1")
REFUSES = 0  # the limit of lines that return 1 for numbers which need another way


class _WordsOfPlane(NamedTuple):
    """The words of the table that get the addresses of a plane's buffers, and the keys of its random numbers."""

    direction: Direction
    codes: list[int]
    scales: list[int]
    amax: list[int]
    key0: list[int]
    key1: list[int]


class Plan:
    """How matrices of one shape and dtype are encoded to new planes of one layout.

    Args:
        x: a matrix.
        targets: new planes for it.
        table: the table of their program.
        lines: the calls of kernels, in their order.
        measured: the line that measures the amax of the matrix; None if there is none.
    """

    def __init__(
        self, x: Tensor, targets: Sequence[Target], table: Table, lines: Sequence[Line], measured: Line | None
    ) -> None:
        finished = table.finished(lines)
        self._amax = None if measured is None else finished.lines[lines.index(measured)].result
        self._encodings = [target.encoding for target in targets]  # kept alive: kernels are found by their addresses
        self._elements = x.numel()
        self._words, self._lines, self._inside = finished.words, finished.lines, finished.inside
        self._scratch, self._scratch_bytes = finished.scratch, finished.scratch_bytes
        at = finished.given
        self._x = [word for given, words in at.items() if given.kind == "x" for word in words]
        self._planes = [
            _WordsOfPlane(target.plane.direction, *(at.get(Given(kind, i), []) for kind in _WordsOfPlane._fields[1:]))
            for i, target in enumerate(targets)
        ]
        self._program = kernel(programs.program, 0, 0, 0, F32)

    def run(
        self, x: Tensor, planes: Sequence[Plane], seed: int | None, amaxes: list[Tensor] | None = None
    ) -> bool | None:
        """Measure and encode. Returns whether there is a NaN or an infinity; None if the numbers need another way.

        Args:
            x: a matrix like that of the plan: of the same shape and dtype, contiguous, with memory.
            planes: planes like those of the plan.
            seed: seed of stochastic rounding; None if no plane is rounded stochastically.
            amaxes: a list to which the amax of the matrix is appended, fp32 [1], if a plane needs it.
        """
        table = self._words[:]
        base = table.buffer_info()[0]
        found = x.data_ptr()
        for at in self._x:
            table[at] = found
        for plane, (direction, codes, scales, amax, key0, key1) in zip(planes, self._planes, strict=True):
            found = plane.data.data_ptr()
            for at in codes:
                table[at] = found
            if scales:
                found = plane.scale.data_ptr()  # type: ignore[union-attr]
                for at in scales:
                    table[at] = found
            for at in amax:
                table[at] = plane.amax.data_ptr()  # type: ignore[union-attr]
            if key0:
                keys = stream_keys(seed, direction)  # type: ignore[arg-type]
                for at in key0:
                    table[at] = keys[0]
                for at in key1:
                    table[at] = keys[1]
        for at, distance in self._inside:
            table[at] = base + distance
        alone = self._elements < 2 * runtime.ELEMENTS_PER_THREAD or thread_count(self._elements) == 1
        # Between the lines of several threads a signal's handler may use the scratch memory of this one.
        memory = scratch(self._scratch_bytes) if alone else _new_memory(self._scratch_bytes)
        found = memory.data_ptr()
        for at, distance in self._scratch:
            table[at] = found + distance
        bits = self._program(base, 0, len(self._lines), F32) if alone else self._on_threads(table, (x, planes, memory))
        if amaxes is not None and self._amax is not None:
            amaxes.append(from_bits(table[self._amax]))
        return None if bits == REFUSED else bits >= INFINITY_BITS

    def _on_threads(self, table: array[int], keep: Any) -> int:
        """The lines one after the other. Those that are called for a range run on several threads."""
        most = 0
        for number, line in enumerate(self._lines):
            if line.steps is None:
                self._program(table.buffer_info()[0], number, number + 1, F32)
                continue

            def work(first: int, last: int, number: int = number, line: Line = line, keep: Any = keep) -> int:
                mine = table[:]
                mine[line.first], mine[line.first + 1] = first, last
                memory = scratch(line.scratch)  # held: a signal's handler may make this thread need more
                if line.scratch_at is not None:
                    mine[line.scratch_at] = memory.data_ptr()
                return int(self._program(mine.buffer_info()[0], number, number + 1, F32))

            results = run_ranges(work, line.steps, self._elements)
            if REFUSED in results:
                return REFUSED
            table[line.result] = max(results)
            most = max(most, *results)
        return most


def _new_memory(size: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def plan_for(x: Tensor, targets: Sequence[Target]) -> Plan | None:
    """A plan for matrices like ``x`` and new planes like those of ``targets``; None if kernels cannot do everything."""
    table = Table()
    written = lines_to_write(table, x, targets)
    return None if written is None else Plan(x, targets, table, written.lines, written.measured)


class LinesToWrite(NamedTuple):
    """The calls of kernels that measure and encode a matrix.

    Attributes:
        lines: all of them, in their order.
        measured: the one that measures the amax of the matrix; None if there is none.
        scale: where the scale to encode with is, if the first plane has one for all; otherwise None.
    """

    lines: list[Line]
    measured: Line | None
    scale: Beyond | None


def lines_to_write(table: Table, x: Tensor, targets: Sequence[Target], first: int = 0) -> LinesToWrite | None:
    """Add to ``table`` what measures ``x`` and encodes it to new planes; None if kernels cannot do everything.

    Args:
        table: the table of a program.
        x: a matrix like those that the program gets.
        targets: new planes for it.
        first: the number of the first plane, by which its addresses are `Given`; the others follow.
    """
    if x.dtype not in (torch.float32, torch.bfloat16) or x.numel() == 0 or not all(map(_is_plain, targets)):
        return None
    steps, left = chosen_work(x.dtype, targets)
    measures: dict[int | None, Line] = {}  # by the rotation before which the amax is taken
    for number, target in enumerate(targets):
        rotation = target.encoding.format.rotation
        if not target.encoding.needs_amax or rotation in measures:
            continue
        line = _measure(table, x, first + number, target)
        if line is None:
            return None
        measures[rotation] = line
    if left:
        return None
    scales = {number: _Scales(table, target) for number, target in enumerate(targets) if target.encoding.needs_amax}
    encodes = [_encode(table, x, targets, scales, step, first) for step in steps]
    computes = [
        each.line(table, first + number, measures[targets[number].encoding.format.rotation].result)
        for number, each in scales.items()
    ]
    one_scale = targets[0].encoding.format.block is None and 0 in scales
    scale = scales[0].encode if one_scale else None
    return LinesToWrite([*measures.values(), *computes, *encodes], measures.get(None), scale)


def _is_plain(target: Target) -> bool:
    """Whether the target is a new plane in a format that kernels know, with one amax at most, that of the matrix.

    A per-tensor format may have a given scale.
    """
    given = target.amax is not None or target.within is not None
    scaled = target.scale is not None and target.encoding.format.block is not None
    known = is_standard(target.plane) and target.encoding.random == "hash"
    return known and not given and not scaled and target.encoding.format.global_amax != "row"


def _measure(table: Table, x: Tensor, number: int, target: Target) -> Line | None:
    """The line that measures the amax of a target; None if there is no kernel for it."""
    plane, rotation = target.plane, target.encoding.format.rotation
    width, dtype, at = plane.shape[1], tag_of_dtype(x.dtype), Given("x", number)
    if rotation is None:
        return table.line(measure.of_all, (at, FIRST, LAST, dtype, NO), steps=x.numel(), limit=INFINITY_BITS)
    if not plane.transposed or width < 16:
        return None
    arguments = (at, width * x.element_size(), FIRST, LAST, width, dtype, tag(str(rotation)))
    return table.line(measure.of_rotated, arguments, steps=plane.shape[0] // 16, limit=INFINITY_BITS)


class _Scales:
    """Where the global scales of a target are, which a line computes from its amax.

    Attributes:
        encode: address of the scale to encode with.
        decode: address of the scale to decode with.
        amax: address of the amax.
        factors: the words of the table that are the scale to encode with.
    """

    def __init__(self, table: Table, target: Target) -> None:
        self.target = target
        count = 1 if target.encoding.format.block is None else target.plane.operand_shape[0]
        self.encode, self.decode, self.amax = (table.beyond(count) for _ in range(3))
        self.factors: list[int] = []
        self.count = count

    def line(self, table: Table, number: int, bits: int) -> Line:
        """The line that computes them; ``bits`` is the word with the bits of the amax."""
        encoding, fmt = self.target.encoding, self.target.encoding.format
        if fmt.block is None:
            factor: Inside | Beyond = Inside(self.factors[0]) if self.factors else self.decode
            if self.target.scale is not None:
                given = Given("given", number), factor, self.encode, Given("scales", number), F32
                return table.line(programs.given_factor, given, limit=REFUSES)
            arguments: tuple[Any, ...] = (
                Inside(bits), factor, self.encode, Given("scales", number),
                float(fmt.target), scalars.fp32(encoding.epsilon), bool(encoding.power_of_two), F32,
            )  # fmt: skip
            return table.line(programs.tensor_factor, arguments)
        assert fmt.element is not None
        share = SIXTH if encoding.four_over_six is None else 1.0
        arguments = (
            Inside(bits), Given("amax", number), self.encode, self.decode, self.amax, self.count,
            float(fmt.element.max * fmt.scale_bound), share, F32,
        )  # fmt: skip
        return table.line(programs.two_level_scales, arguments)


def _encode(
    table: Table, x: Tensor, targets: Sequence[Target], scales: dict[int, _Scales], step: Step, first: int
) -> Line:
    """The line that encodes some of the targets."""
    begin, arguments = len(table.words), list(step.work.arguments)
    for place, slot in enumerate(arguments):
        if type(slot) is not Slot or slot in (FIRST, LAST, SCRATCH):
            continue
        number = step.at[slot.target]
        assert number is not None
        if slot.kind in _GIVEN:
            arguments[place] = Given(slot.kind, first + number)
        elif slot.kind in Place._fields:
            arguments[place] = getattr(place_of(targets[number], x), slot.kind)
        elif slot.kind == "factor":
            arguments[place] = 0.0
            scales[number].factors.append(begin + place)
        else:  # a format without global scale has ones
            found = scales.get(number)
            arguments[place] = support.ONE.address if found is None else getattr(found, slot.kind.removeprefix("each_"))
    limit = INFINITY_BITS if step.work.refuses_nan else NO_LIMIT
    steps = step.work.steps(x.shape[0])
    return table.line(step.work.kernel, arguments, steps=steps, scratch=step.work.scratch, limit=limit)
