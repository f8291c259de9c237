"""Rules of a recipe, and which layers they are for: by path, by position among the blocks, or by module type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from .layer_formats import Settings
from .percent import NUMBER, Percent
from .syntax import RecipeSyntaxError

_BLOCKS = re.compile(
    rf"(?P<end>first|last)\s+(?:(?P<count>\d+)\s+blocks?|(?P<percent>{NUMBER})\s*%\s*of\s+blocks)"
    r"(?:\s*\((?P<paths>[^()]*)\))?"
)
_TYPE = re.compile(r"type\s*=\s*(\w+)")
_NOT_IN_PATHS = re.compile(r"[\s:;(){}'\"]")
TOP = "*."  # a pattern that begins so is also for layers at the top of the model


@dataclass(frozen=True)
class Glob:
    """Layers by path: ``*.lm_head`` or ``*.q_proj|*.k_proj``.

    A pattern is for the whole path, in the syntax of `fnmatch`. ``*`` also matches dots. ``*.lm_head`` is for a layer
    of this name anywhere, also at the top of the model.
    """

    patterns: tuple[str, ...]

    def matches(self, name: str, module_type: str) -> bool:
        """Whether a layer is selected."""
        return any(fnmatchcase(name, pattern) or _at_the_top(name, pattern) for pattern in self.patterns)

    def __str__(self) -> str:
        return "|".join(self.patterns)


def _at_the_top(name: str, pattern: str) -> bool:
    return pattern.startswith(TOP) and name != "" and "." not in name and fnmatchcase(name, pattern.removeprefix(TOP))


@dataclass(frozen=True)
class Blocks:
    """Layers by position: ``first 2 blocks``, ``last 15 % of blocks``.

    After `GemmRecipe.for_model` it has paths: ``first 2 blocks (layers.0|layers.1)``. A percentage is rounded to the
    nearest number of blocks, but is at least one block.
    """

    end: Literal["first", "last"]
    count: int | Percent
    paths: tuple[str, ...] = ()

    def matches(self, name: str, module_type: str) -> bool:
        """Whether a layer is selected.

        Raises:
            ValueError: the paths are not known yet.
        """
        if not self.paths:
            raise ValueError(
                f"'{self}': which layers these are depends on the model; use recipe.for_model(model) instead of the "
                "recipe"
            )
        return any(name == path or name.startswith(path + ".") for path in self.paths)

    def __str__(self) -> str:
        known = f" ({'|'.join(self.paths)})" if self.paths else ""
        return (
            f"{self.end} {self.count} {'of blocks' if isinstance(self.count, Percent) else _plural(self.count)}{known}"
        )

    def number_of(self, blocks: int) -> int:
        """How many of so many blocks these are."""
        return self.count.of(blocks) if isinstance(self.count, Percent) else self.count


def _plural(count: int) -> str:
    return "block" if count == 1 else "blocks"


@dataclass(frozen=True)
class ModuleType:
    """Layers by module type: ``type=grouped_linear``."""

    name: str

    def matches(self, name: str, module_type: str) -> bool:
        """Whether a layer is selected."""
        return module_type == self.name

    def __str__(self) -> str:
        return f"type={self.name}"


Matcher = Glob | Blocks | ModuleType


def parse_matcher(text: str) -> Matcher:
    """Parse the pattern of a rule. `str` of the result returns the text again.

    Raises:
        RecipeSyntaxError: the text is not a pattern.
    """
    stripped = text.strip()
    if blocks := _BLOCKS.fullmatch(stripped):
        end: Literal["first", "last"] = "first" if blocks["end"] == "first" else "last"
        try:
            count = int(blocks["count"]) if blocks["count"] else Percent.parse(blocks["percent"])
            if count == 0:
                raise ValueError("the number of blocks must be at least 1")
        except ValueError as error:
            raise RecipeSyntaxError(str(error), text, *_span(text)) from None
        return Blocks(end, count, () if blocks["paths"] is None else _alternatives(text, blocks["paths"]))
    if kind := _TYPE.fullmatch(stripped):
        return ModuleType(kind[1])
    return Glob(_alternatives(text, stripped))


def _alternatives(text: str, joined: str) -> tuple[str, ...]:
    patterns = tuple(pattern.strip() for pattern in joined.split("|"))
    if not all(patterns):
        raise RecipeSyntaxError("a pattern is missing: expected a path like 'layers.0.fc1'", text, *_span(text))
    for pattern in patterns:
        if _NOT_IN_PATHS.search(pattern) or pattern.startswith("type="):
            raise RecipeSyntaxError(
                f"{pattern!r} is not a pattern. A pattern is a path like 'layers.0.fc1', with * for any text and | "
                "between alternatives; or 'first 2 blocks', 'last 15 % of blocks', 'type=grouped_linear'",
                text,
                *_span(text),
            )
    return patterns


def _span(text: str) -> tuple[int, int]:
    start = len(text) - len(text.lstrip())
    return start, max(start + 1, len(text.rstrip()))


@dataclass(frozen=True)
class Rule:
    """Settings for the layers that a matcher selects. What a rule does not set stays as it was.

    Attributes:
        matcher: which layers.
        settings: pairs of keys and values, see `layer_formats`.

    Examples:
        >>> cg.GemmRecipe.load("mxfp8; head: hp").rules[0].matcher
        Glob(patterns=('head',))
    """

    matcher: Matcher
    settings: Settings

    def __post_init__(self) -> None:
        if not self.settings:
            raise ValueError(f"the rule '{self.matcher}' sets nothing")

    @property
    def pattern(self) -> str:
        """What is written before the colon."""
        return str(self.matcher)
