"""The registry of formats by name."""

from __future__ import annotations

from collections.abc import Iterator

from .built_in import BUILT_IN
from .element import E8M0
from .format import AnyElement, Format

_FORMATS: dict[str, Format] = {}


def register_format(fmt: Format) -> Format:
    """Make ``fmt`` known by its name. Registering the same value twice is fine, another is an error."""
    known = _FORMATS.setdefault(fmt.name, fmt)
    if known != fmt:
        raise ValueError(f"another format is already registered as {fmt.name!r}")
    return fmt


def get_format(name: str | Format) -> Format:
    """The format called ``name``; a `Format` is returned as it is."""
    if isinstance(name, Format):
        return name
    try:
        return _FORMATS[name]
    except KeyError:
        raise KeyError(f"no format {name!r}; there are {', '.join(_FORMATS)}") from None


def get_element(name: str) -> AnyElement:
    """The element of that name, of those that scales and registered formats have; ``get_element("e4m3") is E4M3``."""
    known = {fmt.element.name: fmt.element for fmt in reversed(_FORMATS.values()) if fmt.element} | {E8M0.name: E8M0}
    try:
        return known[name]
    except KeyError:
        raise KeyError(f"no element format {name!r}; there are {', '.join(known)}") from None


def formats() -> Iterator[Format]:
    """All registered formats, in the order of registration."""
    return iter(tuple(_FORMATS.values()))


def format_table() -> str:
    """All registered formats on one screen."""
    head = f"{'name':<26} {'elem':<8} {'block':<8} {'scale':<26} {'column':<6} {'bits':>6}"
    return "\n".join([head, "-" * len(head), *map(str, formats())])


for _format in BUILT_IN:
    register_format(_format)
