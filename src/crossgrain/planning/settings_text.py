"""Parse texts like ``b200, memory=192``: a name, and numbers that change something about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..recipe.syntax import did_you_mean


def settings_of(text: str, known: Sequence[str], whole: Sequence[str], what: str) -> tuple[str | None, dict[str, Any]]:
    """Parse a name and settings.

    Args:
        text: the text.
        known: names of settings.
        whole: names of settings that are whole numbers.
        what: what the text is about, for messages.

    Returns:
        The name (None if there is none) and the settings.

    Raises:
        ValueError: a setting is not known, or not a number.
    """
    name: str | None = None
    settings: dict[str, Any] = {}
    for position, piece in enumerate(part.strip() for part in text.split(",")):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals:
            if position or not piece:
                raise ValueError(f"{what} {text!r}: {piece!r} is not a setting; write it like {known[0]}=...")
            name = piece
            continue
        if key not in known:
            raise ValueError(f"{what} {text!r}: there is no setting {key!r}{did_you_mean(key, known)}")
        try:
            settings[key] = int(value) if key in whole else float(value)
        except ValueError:
            number = "a whole number" if key in whole else "a number"
            raise ValueError(f"{what} {text!r}: {key} must be {number}, got {value!r}") from None
    return name, settings
