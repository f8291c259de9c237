"""The registry: formats by name."""

from __future__ import annotations

from collections.abc import Iterator

from .built_in import BUILT_IN
from .element import E8M0, UE5M3
from .format import AnyElement, Format

_FORMATS: dict[str, Format] = {}


def register_format(fmt: Format) -> Format:
    """Register a format, so that it can be used by its name in `quantize`, in recipes and in files.

    Args:
        fmt: the format. Registering an equal format again is allowed.

    Returns:
        The format.

    Raises:
        ValueError: another format is registered with this name.

    Examples:
        >>> from dataclasses import replace
        >>> short = replace(cg.get_format("mxfp8"), name="mxfp8_by_16", block=(1, 16))
        >>> cg.register_format(short) is short
        True
        >>> cg.quantize(torch.ones(32, 32), "mxfp8_by_16").plane(cg.ROWWISE).format.name
        'mxfp8_by_16'
    """
    known = _FORMATS.setdefault(fmt.name, fmt)
    if known != fmt:
        raise ValueError(f"another format is already registered as {fmt.name!r}")
    return fmt


def get_format(name: str | Format) -> Format:
    """Return a registered format by name. A `Format` is returned as it is.

    Args:
        name: the name, or a format.

    Raises:
        KeyError: there is no format of this name.

    Examples:
        >>> cg.get_format("nvfp4").block
        (1, 16)
    """
    if isinstance(name, Format):
        return name
    try:
        return _FORMATS[name]
    except KeyError:
        raise KeyError(f"there is no format {name!r}; available: {', '.join(_FORMATS)}") from None


def get_element(name: str) -> AnyElement:
    """Return an element of a registered format, or of scales, by name: ``get_element("e4m3") is E4M3``.

    Raises:
        KeyError: there is no element of this name.

    Examples:
        >>> cg.formats.get_element("e2m1").max
        6.0
    """
    known = {fmt.element.name: fmt.element for fmt in reversed(_FORMATS.values()) if fmt.element} | {
        scale.name: scale for scale in (E8M0, UE5M3)
    }
    try:
        return known[name]
    except KeyError:
        raise KeyError(f"there is no element {name!r}; available: {', '.join(known)}") from None


def formats() -> Iterator[Format]:
    """All registered formats, in the order in which they were registered.

    Examples:
        >>> [fmt.name for fmt in cg.formats.formats()][:3]
        ['fp8', 'fp8_e5m2', 'fp8_block']
    """
    return iter(tuple(_FORMATS.values()))


def format_table() -> str:
    """A table of all registered formats, as text.

    Examples:
        >>> print(" ".join(cg.formats.format_table().splitlines()[0].split()))
        name elem block scale column bits
    """
    head = f"{'name':<26} {'elem':<8} {'block':<8} {'scale':<26} {'column':<6} {'bits':>6}"
    return "\n".join([head, "-" * len(head), *map(str, formats())])


for _format in BUILT_IN:
    register_format(_format)
