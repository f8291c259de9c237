"""The syntax of recipes in text: calls like ``nvfp4(rht, sr)``, and errors that point at the mistake."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_SHOWN = 90  # an error shows at most so many columns of the text: they fit into a terminal with an indentation


class RecipeSyntaxError(ValueError):
    """A mistake in the text of a recipe. The message shows the text, with carets under the mistake.

    Examples:
        >>> cg.GemmRecipe.load("nvfp4(rth)")
        Traceback (most recent call last):
        ...
        crossgrain.recipe.syntax.RecipeSyntaxError: nvfp4 has no option 'rth'; did you mean 'rht'?
          nvfp4(rth)
                ^^^
    """

    def __init__(self, message: str, text: str, start: int = 0, end: int | None = None) -> None:
        super().__init__(message, text, start, len(text) if end is None else end)

    @property
    def message(self) -> str:
        """The message without the text."""
        return str(self.args[0])

    def within(self, text: str, offset: int) -> RecipeSyntaxError:
        """The same mistake in a longer ``text``, in which the text of this error begins at ``offset``."""
        return RecipeSyntaxError(self.message, text, self.args[2] + offset, self.args[3] + offset)

    def __str__(self) -> str:
        return self.shown(_SHOWN)

    def shown(self, columns: int) -> str:
        """The message, at most ``columns`` columns of the text, and carets under the mistake."""
        message, text, start, end = self.args
        text = re.sub(r"\s", " ", text)  # a caret points into one line
        left = max(0, min(start - columns // 3, len(text) - columns))
        shown, start, end = text[left : left + columns], start - left, end - left
        if left:
            shown, start, end = "..." + shown, start + 3, end + 3
        if left + columns < len(text):
            shown += "..."
        carets = "^" * max(1, min(end, len(shown)) - start)
        return f"{message}\n  {shown}\n  {' ' * start}{carets}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a message: ``"; did you mean 'rht'?"``, or the list of all known words."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; available: {', '.join(known) or 'none'}"


@dataclass(frozen=True)
class Call:
    """``name``, ``name=value`` or ``name(args)``, and its position in the text."""

    name: str
    start: int
    end: int
    value: str | None = None
    args: tuple[Call, ...] = ()


def parse_call(text: str) -> Call:
    """Parse a text like ``nvfp4(rht, 4over6(mse))`` into a tree.

    Raises:
        RecipeSyntaxError: the text is not exactly one call.
    """
    call, position = _call(text, _skip(text, 0))
    if position != len(text):
        raise RecipeSyntaxError(f"unexpected text after {call.name!r}", text, position)
    return call


def _call(text: str, position: int) -> tuple[Call, int]:
    word = _WORD.match(text, position)
    if word is None:
        what = repr(text[position]) if position < len(text) else "the end"
        raise RecipeSyntaxError(f"expected a name, got {what}", text, position, position + 1)
    name, start, end = word.group(), word.start(), word.end()
    position = _skip(text, end)
    if text[position : position + 1] == "=":
        value = _WORD.match(text, _skip(text, position + 1))
        if value is None:
            raise RecipeSyntaxError(f"{name}= needs a value", text, start, position + 1)
        return Call(name, start, value.end(), value.group()), _skip(text, value.end())
    if text[position : position + 1] != "(":
        return Call(name, start, end), position
    opened, separator = position, ","
    args: list[Call] = []
    while separator == ",":
        position = _skip(text, position + 1)
        if not args and text[position : position + 1] == ")":
            separator = ")"
            break
        arg, position = _call(text, position)
        args.append(arg)
        separator = text[position : position + 1]
    if separator != ")":
        raise RecipeSyntaxError("this parenthesis is not closed", text, opened, opened + 1)
    return Call(name, start, end, args=tuple(args)), _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
