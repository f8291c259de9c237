"""Compiled kernels, broken on purpose: the emulator finds each of the mistakes for which it is there."""

import random
import re
from collections import Counter

import pytest

from . import PtxError
from .cases import CASES
from .compiled import compiled

_CASES = [("tile", "sm_90"), ("ragged", "sm_80"), ("transpose", "sm_100")]


def _lines(case: str, target: str) -> list[str]:
    return compiled(case, target).ptx.split("\n")


def _check(case: str, target: str, lines: list[str]) -> None:
    CASES[case].check("\n".join(lines), compiled(case, target).shared)


def _without(lines: list[str], number: int) -> list[str]:
    return [*lines[:number], *lines[number + 1 :]]


def _chosen(numbers: list[int], count: int) -> list[int]:
    return random.Random(0).sample(numbers, min(count, len(numbers)))


@pytest.mark.parametrize("case, target", _CASES)
def test_a_race_without_each_of_the_barriers(case: str, target: str) -> None:
    lines = _lines(case, target)
    barriers = [number for number, line in enumerate(lines) if line.strip().startswith("bar.sync")]
    assert barriers
    for number in barriers:
        with pytest.raises(PtxError, match="^race: byte .* of shared memory"):
            _check(case, target, _without(lines, number))


@pytest.mark.parametrize("case, target", _CASES)
def test_a_barrier_for_some_threads_is_found(case: str, target: str) -> None:
    lines = _lines(case, target)
    number = next(number for number, line in enumerate(lines) if line.strip().startswith("bar.sync"))
    some = ".reg .pred some; .reg .b32 me; mov.u32 me, %tid.x; setp.lt.u32 some, me, 96; @some bar.sync 0;"
    with pytest.raises(PtxError, match="only 96 of 128 threads of a block come to the barrier|^race"):
        _check(case, target, [*lines[:number], "{" + some + "}", *lines[number + 1 :]])


@pytest.mark.parametrize("case, target", _CASES)
@pytest.mark.parametrize(
    "offset, what", [(1 << 20, "out of bounds"), (-(1 << 20), "no buffer|out of bounds"), (1, "misaligned")]
)
def test_shifted_addresses_are_found(case: str, target: str, offset: int, what: str) -> None:
    lines = _lines(case, target)
    access = re.compile(r"(\s+(?:@%p\d+ )?(?:ld|st)\.global\.(?:v\d\.)?b(?:16|32|64) .*\+ )0( \].*)")
    places = [number for number, line in enumerate(lines) if access.fullmatch(line)]
    assert places
    for number in _chosen(places, 4):
        changed = access.sub(rf"\g<1>{offset}\g<2>", lines[number])
        with pytest.raises(PtxError, match=what):
            _check(case, target, [*lines[:number], changed, *lines[number + 1 :]])


@pytest.mark.parametrize("case, target", _CASES)
def test_registers_that_nobody_writes_are_found(case: str, target: str) -> None:
    lines = _lines(case, target)
    writes = re.compile(r"\s+(?!setp|st|bar|bra|red|atom|ret)[a-z][\w.]+\s+(%r[sd]?\d+), (?!0x0;).*;")
    written = Counter(found[1] for line in lines if (found := writes.fullmatch(line)))
    text = "\n".join(lines)
    once = [
        number
        for number, line in enumerate(lines)
        if (found := writes.fullmatch(line)) and written[found[1]] == 1 and len(re.findall(rf"{found[1]}\b", text)) > 1
    ]
    assert len(once) > 20
    for number in _chosen(once, 8):
        with pytest.raises(PtxError, match="undefined"):
            _check(case, target, _without(lines, number))


@pytest.mark.parametrize(
    "case, target, opcode",
    [("tile", "sm_90", "div.rn.f32"), ("tile", "sm_90", "setp.lt.s32"), ("transpose", "sm_100", "prmt.b32")],
)
def test_swapped_operands_are_wrong(case: str, target: str, opcode: str) -> None:
    lines = _lines(case, target)
    places = [number for number, line in enumerate(lines) if line.strip().startswith(opcode)]
    for number in _chosen(places, 3):
        swapped = re.sub(r"(\s+\S+\s+%\w+, )(%?\w+), (%?\w+);", r"\1\3, \2;", lines[number])
        assert swapped != lines[number]
        with pytest.raises((PtxError, AssertionError)):
            _check(case, target, [*lines[:number], swapped, *lines[number + 1 :]])


def test_too_little_shared_memory_is_found() -> None:
    built = compiled("transpose", "sm_100")
    with pytest.raises(PtxError, match="out of bounds.*shared memory"):
        CASES["transpose"].check(built.ptx, built.shared - 16)
