"""Which layers a rule is for: by path, by position among the blocks, by module type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from .layer_formats import Settings
from .syntax import RecipeSyntaxError

_BLOCKS = re.compile(r"(first|last)\s+(\d+)\s+blocks?(?:\s*\(([^()]*)\))?")
_TYPE = re.compile(r"type\s*=\s*(\w+)")
_NOT_IN_PATHS = re.compile(r"[\s:;(){}'\"]")


@dataclass(frozen=True)
class Glob:
    """``*.lm_head`` or ``*.q_proj|*.k_proj``: the whole path, by the rules of `fnmatch`; ``*`` also crosses dots."""

    patterns: tuple[str, ...]

    def matches(self, name: str, module_type: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __str__(self) -> str:
        return "|".join(self.patterns)


@dataclass(frozen=True)
class Blocks:
    """``first 2 blocks``; once the model is known, also which they are: ``first 2 blocks (layers.0|layers.1)``."""

    end: Literal["first", "last"]
    count: int
    paths: tuple[str, ...] = ()

    def matches(self, name: str, module_type: str) -> bool:
        if not self.paths:
            raise ValueError(
                f"'{self}': which blocks these are depends on the model; use recipe.for_model(model) instead of recipe"
            )
        return any(name == path or name.startswith(path + ".") for path in self.paths)

    def __str__(self) -> str:
        known = f" ({'|'.join(self.paths)})" if self.paths else ""
        return f"{self.end} {self.count} block{'s' * (self.count != 1)}{known}"


@dataclass(frozen=True)
class ModuleType:
    """``type=grouped_linear``: the module type of the role."""

    name: str

    def matches(self, name: str, module_type: str) -> bool:
        return module_type == self.name

    def __str__(self) -> str:
        return f"type={self.name}"


Matcher = Glob | Blocks | ModuleType


def parse_matcher(text: str) -> Matcher:
    """The matcher that is written like this; `str` gives the text back."""
    stripped = text.strip()
    if blocks := _BLOCKS.fullmatch(stripped):
        end: Literal["first", "last"] = "first" if blocks[1] == "first" else "last"
        if int(blocks[2]) < 1:
            raise RecipeSyntaxError("at least one block is needed", text, *_span(text))
        return Blocks(end, int(blocks[2]), _alternatives(text, blocks[3]) if blocks[3] is not None else ())
    if kind := _TYPE.fullmatch(stripped):
        return ModuleType(kind[1])
    return Glob(_alternatives(text, stripped))


def _alternatives(text: str, joined: str) -> tuple[str, ...]:
    patterns = tuple(pattern.strip() for pattern in joined.split("|"))
    if not all(patterns):
        raise RecipeSyntaxError("a pattern is missing", text, *_span(text))
    for pattern in patterns:
        if _NOT_IN_PATHS.search(pattern) or pattern.startswith("type="):
            raise RecipeSyntaxError(
                f"{pattern!r} is not a pattern; these are: a path like 'layers.0.fc1', with * for anything and | "
                "between alternatives; 'first 2 blocks'; 'last 2 blocks'; 'type=grouped_linear'",
                text,
                *_span(text),
            )
    return patterns


def _span(text: str) -> tuple[int, int]:
    start = len(text) - len(text.lstrip())
    return start, max(start + 1, len(text.rstrip()))


@dataclass(frozen=True)
class Rule:
    """Settings for the layers that a matcher selects; they are merged on top of what was set before."""

    matcher: Matcher
    settings: Settings

    def __post_init__(self) -> None:
        if not self.settings:
            raise ValueError(f"the rule '{self.matcher}' sets nothing")
