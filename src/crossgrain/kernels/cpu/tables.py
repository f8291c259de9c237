"""`Table`: the table of a program (see `programs`), as it is put together.

A word of it is a number, or one of the addresses below, which are known when the program runs.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from .jobs import SLOT, jobs, work_tag
from .programs import LINE
from .runtime import EXAMPLES, address, kind_of
from .tags import Tag
from .work import FIRST, SCRATCH, Slot

NO_LIMIT = (1 << 63) - 1


class Given(NamedTuple):
    """An address, or a key of random numbers, that the caller gives: of what kind, and for which plane."""

    kind: str
    plane: int


class Inside(NamedTuple):
    """The address of a word of the table."""

    word: int


class Beyond(NamedTuple):
    """An address in scratch memory, so many bytes behind the part that kernels use for themselves."""

    distance: int


class Line(NamedTuple):
    """A call of a kernel.

    Attributes:
        head: addresses of its runner and of the kernel.
        arguments: the first word of its arguments.
        result: the word with its result.
        limit: the largest result with which the program goes on.
        steps: the number of steps, which threads can share; None if the kernel is not called for a range.
        scratch: bytes of scratch memory that each thread needs.
        first: the word with the first step; that with the last one follows.
        scratch_at: the word with the address of scratch memory; None if the kernel needs none.
    """

    head: tuple[int, int]
    arguments: int
    result: int
    limit: int
    steps: int | None
    scratch: int
    first: int
    scratch_at: int | None


class Table:
    """Words of arguments and results. The lines themselves are added at the end, in their order, before the words.

    Attributes:
        words: the words.
        places: addresses in scratch memory for what nobody gives.
    """

    def __init__(self) -> None:
        self.words: list[Any] = []
        self.places: dict[Given, Beyond] = {}
        self._beyond = 0

    def line(
        self,
        kernel: Any,
        arguments: Sequence[Any],
        *,
        steps: int | None = None,
        scratch: int = 0,
        limit: int = NO_LIMIT,
    ) -> Line:
        """Add the words of a call. Arguments are numbers, addresses, FIRST, LAST, SCRATCH, and tags at the end."""
        numbers = [argument for argument in arguments if type(argument) is not Tag]
        tags = [argument for argument in arguments if type(argument) is Tag]
        begin = len(self.words)
        self.words += [*numbers, 0]
        for at, argument in enumerate(numbers, begin):
            if type(argument) is Slot and argument != SCRATCH:
                self.words[at] = 0 if argument == FIRST else steps
        kinds = "".join("i" if isinstance(number, tuple) else kind_of(number) for number in numbers)
        head = (
            address(jobs, 0, 0, 0, 0, 0, work_tag(kinds, len(tags))),
            address(kernel, *[EXAMPLES[kind] for kind in kinds], *tags),
        )
        slots = {number: at for at, number in enumerate(numbers, begin) if type(number) is Slot}
        first, own = slots.get(FIRST), slots.get(SCRATCH)
        return Line(head, begin, len(self.words) - 1, limit, steps, scratch, first or 0, own)

    def beyond(self, count: int) -> Beyond:
        """Scratch memory for ``count`` fp32 numbers."""
        place = Beyond(self._beyond)
        self._beyond += -(-count * 4 // 64) * 64
        return place

    def finished(self, lines: Sequence[Line]) -> Finished:
        """The table with these lines."""
        words = [self.places.get(word, word) if isinstance(word, Given) else word for word in self.words]
        return Finished(words, lines, self._beyond)


class Finished:
    """A complete table.

    Attributes:
        words: all numbers; zero in the place of addresses.
        lines: the lines, with the words' indices in ``words``.
        given: the words of each `Given`.
        inside: words, and the distance in bytes of what they point to from the beginning of the table.
        scratch: words, and the distance of what they point to from the beginning of scratch memory.
        own_bytes: the part of scratch memory that kernels use for themselves; a `Beyond` lies behind it.
        scratch_bytes: the size of scratch memory.
    """

    def __init__(self, words: Sequence[Any], lines: Sequence[Line], beyond: int) -> None:
        heads = LINE * len(lines)
        own = -(-max(line.scratch for line in lines) // 64) * 64
        self.own_bytes, self.scratch_bytes = own, own + beyond
        self.given: dict[Given, list[int]] = {}
        self.inside: list[tuple[int, int]] = []
        self.scratch: list[tuple[int, int]] = []
        numbers: list[int] = []
        for line in lines:
            numbers += [*line.head, (heads + line.arguments) * SLOT, (heads + line.result) * SLOT, line.limit]
        for at, word in enumerate(words, heads):
            numbers.append(0 if isinstance(word, tuple) else as_word(word))
            if isinstance(word, Given):
                self.given.setdefault(word, []).append(at)
            elif isinstance(word, Inside):
                self.inside.append((at, (heads + word.word) * SLOT))
            elif isinstance(word, Beyond):
                self.scratch.append((at, own + word.distance))
            elif isinstance(word, Slot):
                assert word == SCRATCH
                self.scratch.append((at, 0))
        self.words = array("q", numbers)
        self.lines = [
            line._replace(
                result=heads + line.result,
                first=heads + line.first,
                scratch_at=None if line.scratch_at is None else heads + line.scratch_at,
            )
            for line in lines
        ]


def as_word(number: Any) -> int:
    """A word with a number: an integer, or the bits of an fp32 number."""
    if isinstance(number, float):
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        return int(bits)
    return int(number)
