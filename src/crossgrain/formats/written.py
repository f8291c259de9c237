"""Elements, layouts and formats as plain fields, for pickles and files, and back.

Only fields that are not at their default are written. A version of crossgrain that has a field more than
another then writes the same as the other, unless the field says something; the other refuses what it does
not know, by name, rather than read bytes as what they are not.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

_KINDS: dict[str, type] = {}


class NewerVersionError(ValueError):
    """A pickle or a file says something about a format that this version of crossgrain has no word for."""


class WrittenByFields:
    """A frozen dataclass whose values are pickled as the fields that say something."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def __reduce__(self) -> tuple[Any, ...]:
        return from_fields, (type(self).__name__, changed_fields(self))


def changed_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that have no default, or another value."""
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: field.default for field in fields(value)}
    return {name: v for name, v in given.items() if defaults[name] is MISSING or v != defaults[name]}


def from_fields(kind: str, given: dict[str, Any]) -> Any:
    """The value of `changed_fields`: ``from_fields("Element", {"name": "e2m1", ...})``."""
    if kind not in _KINDS:
        raise NewerVersionError(_newer(f"a {kind}", "which is a kind of value"))
    known = [field.name for field in fields(_KINDS[kind])]
    for name in given:
        if name not in known:
            what = f"the {kind.removeprefix('Table').lower()} {given['name']!r}" if "name" in given else f"a {kind}"
            raise NewerVersionError(_newer(f"{what} with {name} = {given[name]!r}", f"and {name} is a field"))
    return _KINDS[kind](**given)


def _newer(what: str, why: str) -> str:
    return (
        f"{what} cannot be read, {why} that this version of crossgrain does not know: a newer version wrote it. "
        "Read it with that version"
    )
