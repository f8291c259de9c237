"""`RuleIndex`: which rules of a recipe are for a layer, without trying each of them.

A recipe may have a rule for every layer of a large model. To try all rules for all layers would be quadratic, so a
pattern is tried only for names that contain the rarest of its words: ``layers.17.*`` for names with the part ``17``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import translate
from functools import cached_property
from typing import NamedTuple

from .rules import TOP, Glob, Matcher

_SPECIAL = re.compile(r"[*?\[\]]")
_SETS = re.compile(r"\[.*\]")  # may contain dots


class Place(NamedTuple):
    """Where a pattern stands: the position of its rule, and its position among the alternatives of the rule."""

    rule: int
    pattern: int = 0


class RuleIndex:
    """Finds the rules for a layer: those whose ``matcher.matches(name, module_type)`` is true.

    Attributes:
        matchers: of the rules, in their order.
    """

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self.matchers = tuple(matchers)

    def singles(self) -> Iterator[tuple[Place, Matcher]]:
        """All patterns, each as a matcher of its own, in their order."""
        for rule, matcher in enumerate(self.matchers):
            parts = [Glob((pattern,)) for pattern in matcher.patterns] if isinstance(matcher, Glob) else [matcher]
            yield from ((Place(rule, position), part) for position, part in enumerate(parts))

    def places(self, name: str, module_type: str) -> list[Place]:
        """The patterns that select a layer, in their order.

        Raises:
            ValueError: a rule is for blocks, whose paths are not known yet.
        """
        others = [place for place, matcher in self._others if matcher.matches(name, module_type)]
        return sorted({*others, *self._by_path(name)})

    def rules(self, name: str, module_type: str) -> list[int]:
        """The positions of the rules that select a layer, in their order.

        Raises:
            ValueError: a rule is for blocks, whose paths are not known yet.
        """
        return list(dict.fromkeys(place.rule for place in self.places(name, module_type)))

    def names(self, name: str) -> bool:
        """Whether a pattern selects a layer by its path, and does not end in ``*`` for any layer there."""
        found = (self.matchers[place.rule].patterns[place.pattern] for place in self._by_path(name))  # type: ignore[union-attr]
        return any(pattern.rpartition(".")[2] != "*" for pattern in found)

    def _by_path(self, name: str) -> list[Place]:
        found = self._everywhere.find(name)
        return found if not name or "." in name else [*found, *self._at_the_top.find(name)]

    @cached_property
    def _others(self) -> list[tuple[Place, Matcher]]:
        return [(place, matcher) for place, matcher in self.singles() if not isinstance(matcher, Glob)]

    @cached_property
    def _everywhere(self) -> _Patterns:
        return _Patterns(list(self._globs()))

    @cached_property
    def _at_the_top(self) -> _Patterns:
        return _Patterns([(place, text.removeprefix(TOP)) for place, text in self._globs() if text.startswith(TOP)])

    def _globs(self) -> Iterator[tuple[Place, str]]:
        for place, matcher in self.singles():
            if isinstance(matcher, Glob):
                yield place, matcher.patterns[0]


class _Patterns:
    """Patterns of `fnmatch`, by a word that a name must have to match them."""

    def __init__(self, patterns: Sequence[tuple[Place, str]]) -> None:
        self._names: dict[str, list[Place]] = {}
        self._by_word: dict[str | None, list[tuple[re.Pattern[str], Place]]] = {}
        words = {pattern: _words(pattern) for _, pattern in patterns if _SPECIAL.search(pattern)}
        often = Counter(word for pattern in words for word in words[pattern])
        for place, pattern in patterns:
            if pattern not in words:
                self._names.setdefault(pattern, []).append(place)
                continue
            rarest = min(words[pattern], key=lambda word: often[word], default=None)
            self._by_word.setdefault(rarest, []).append((re.compile(translate(pattern)), place))

    def find(self, name: str) -> list[Place]:
        """The places of all patterns that match a name."""
        candidates = [self._by_word.get(word, ()) for word in {None, *name.split(".")}]
        tried = [place for entries in candidates for regex, place in entries if regex.match(name)]
        return [*self._names.get(name, ()), *tried]


def _words(pattern: str) -> list[str]:
    """The parts between dots that are in every name that the pattern matches."""
    return [part for part in _SETS.sub("*", pattern).split(".") if not _SPECIAL.search(part)]
