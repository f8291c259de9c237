"""`patterns_for`: a few patterns that match some names and none of some others.

    model.layers.0.mlp.fc1, model.layers.1.mlp.fc1, ..., model.layers.11.mlp.fc1  ->  *.fc1
    model.layers.2.q_proj, model.layers.3.q_proj, model.layers.2.k_proj, ...      ->  model.layers.[23].*_proj

Names of layers have the number of a block in them. Patterns have no numbers, only sets of digits: blocks 7 to 21 are
``[7-9]``, ``1[0-9]`` and ``2[01]``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

_SPECIAL = re.compile(r"([*?\[])")
_NOT_IN_PATTERNS = re.compile(r"[\s:;(){}'\"|]")


class _Tail(NamedTuple):
    """How names with a number may be matched: what is before the number, and all or the end of what is after it."""

    before: str
    end: str
    whole: bool

    @property
    def is_all(self) -> bool:
        """Whether it is for all names inside of what is numbered."""
        return not self.end and not self.whole


def patterns_for(wanted: Collection[str], others: Collection[str], *, naming: bool = True) -> list[str]:
    """Patterns in the syntax of rules that match all wanted names and no other one.

    What they do with names that are in neither collection is not said. They are short, but not always the shortest.

    Args:
        wanted: the names to match.
        others: names that may not be matched.
        naming: no pattern ends in ``.*``, so that each wanted name is named, as `GemmRecipe.names_layer` says.
    """
    order = {name: position for position, name in enumerate(wanted)}
    left = set(order)
    candidates = dict(_candidates(order, frozenset(others), naming))
    chosen: dict[str, int] = {}
    while left:
        best = max(candidates, key=lambda pattern: (len(candidates[pattern]) / (len(pattern) + 1), pattern))
        covered = candidates.pop(best)
        chosen[best] = min(order[name] for name in covered)
        left -= covered
        candidates = {pattern: still for pattern, names in candidates.items() if (still := names & left)}
    return sorted(chosen, key=lambda pattern: chosen[pattern])


def _candidates(wanted: Collection[str], others: frozenset[str], naming: bool) -> Iterator[tuple[str, frozenset[str]]]:
    """Patterns that match no other name, and the wanted names that each matches."""
    for name in wanted:
        yield literal(name), frozenset([name])
    wrong = _by_ending(others)
    for ending, names in _by_ending(wanted).items():
        if ending not in wrong and len(names) > 1:  # a single name is clearer in full
            yield f"*{literal(ending)}", frozenset(names)
    for pattern, matched in _numbered(wanted, others, naming):
        if len(matched) > 1:
            yield pattern, matched


def _by_ending(names: Iterable[str]) -> dict[str, set[str]]:
    """Names by the endings that patterns may have: whole parts of a path, or what is after an underscore.

    A name at the top of the model has the ending ``.name`` too, because ``*.name`` matches it.
    """
    found: dict[str, set[str]] = {}
    for name in names:
        for ending in _endings(name if "." in name else f".{name}"):
            found.setdefault(ending, set()).add(name)
    return found


def _endings(text: str) -> list[str]:
    return [text[i:] for i, character in enumerate(text) if character in "._" and i + 1 < len(text)]


def _numbered(wanted: Collection[str], others: frozenset[str], naming: bool) -> Iterator[tuple[str, frozenset[str]]]:
    """Patterns for some blocks: in each of them, for one name, for all names with an ending, or for all names."""
    by_tail: dict[_Tail, dict[str, set[str]]] = {}
    for name in wanted:
        for number, tail in _tails(name):
            by_tail.setdefault(tail, {}).setdefault(number, set()).add(name)
    wrong = {numbered for name in others for numbered in _tails(name)}
    for tail, by_number in by_tail.items():
        if naming and tail.is_all:
            continue
        right = {number: names for number, names in by_number.items() if (number, tail) not in wrong}
        middle = "" if tail.whole else ".*"
        for digits, numbers in _digit_patterns(right).items():
            matched = frozenset(name for number in numbers for name in right[number])
            yield f"{literal(tail.before)}{digits}{middle}{literal(tail.end)}", matched


def _tails(name: str) -> Iterator[tuple[str, _Tail]]:
    """The first number of a name, with each of the ways to match what is around it; nothing if it has no number."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isascii() and part.isdecimal()), None)
    if at is None:
        return
    before = "".join(f"{part}." for part in parts[:at])
    after = "".join(f".{part}" for part in parts[at + 1 :])
    yield parts[at], _Tail(before, after, whole=True)
    for ending in (*_endings(after[1:]), *([""] if after else [])):
        yield parts[at], _Tail(before, ending, whole=False)


def _digit_patterns(numbers: Mapping[str, object]) -> dict[str, list[str]]:
    """Patterns for exactly these numbers, with the numbers that each matches."""
    found: dict[str, list[str]] = {}
    for length in sorted({len(number) for number in numbers}):
        found.update(_of_one_length([number for number in numbers if len(number) == length]))
    return found


def _of_one_length(numbers: list[str]) -> dict[str, list[str]]:
    if numbers == [""]:
        return {"": [""]}
    by_digit: dict[str, list[str]] = {}
    for number in numbers:
        by_digit.setdefault(number[0], []).append(number[1:])
    same_rest: dict[tuple[str, ...], list[str]] = {}
    for digit, after in by_digit.items():
        same_rest.setdefault(tuple(sorted(after)), []).append(digit)
    found = {}
    for rests, digits in same_rest.items():
        for pattern, matched in _of_one_length(list(rests)).items():
            found[_set_of(digits) + pattern] = [digit + rest for digit in digits for rest in matched]
    return found


def _set_of(digits: list[str]) -> str:
    """``7``, ``[12]`` or ``[0-359]``."""
    if len(digits) == 1:
        return digits[0]
    runs: list[list[int]] = []
    for digit in sorted(map(int, digits)):
        if runs and runs[-1][-1] + 1 == digit:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    return f"[{''.join(f'{run[0]}-{run[-1]}' if len(run) > 2 else ''.join(map(str, run)) for run in runs)}]"


def literal(text: str) -> str:
    """A pattern for a text; with ``?`` for characters that cannot be written in a pattern."""
    return _NOT_IN_PATTERNS.sub("?", _SPECIAL.sub(r"[\1]", text))
