"""Write elements, layouts and formats as plain fields to pickles and files, and read them.

Only fields that do not have their default values are written. So a newer version of crossgrain with an additional field
writes the same as an older version, unless the field is used. An older version refuses a field that it does not know,
and names it, because it would read the bytes wrongly.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

_KINDS: dict[str, type] = {}


class NewerVersionError(ValueError):
    """A pickle or a file has a format with a field that this version of crossgrain does not know."""


class WrittenByFields:
    """Base class of frozen dataclasses that are pickled as the fields without default values."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def __reduce__(self) -> tuple[Any, ...]:
        return from_fields, (type(self).__name__, changed_fields(self))


def changed_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that have no default, or another value than the default."""
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: field.default for field in fields(value)}
    return {name: v for name, v in given.items() if defaults[name] is MISSING or v != defaults[name]}


def from_fields(kind: str, given: dict[str, Any]) -> Any:
    """Make the object of which `changed_fields` returned the fields: ``from_fields("Element", {"name": "e2m1", ...})``.

    Raises:
        NewerVersionError: the class or a field is not known.
    """
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
        f"{what} cannot be read, {why} that this version of crossgrain does not know. It was written by a newer "
        "version: read it with that version"
    )
