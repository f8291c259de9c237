"""Which options a format has in the text of a recipe.

Some options stand for another registered format: ``nvfp4(2d)`` is ``nvfp4_2d``. A format has such an option if the
other format is registered. The other options are those of the format's quantizer. Formats that are registered later
get their options by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from types import MappingProxyType

from ..formats import E4M3, E5M2, Format, formats, get_format
from ..quantizers.any_format import FormatQuantizer
from ..quantizers.base import Quantizer
from ..quantizers.by_format import quantizer_of
from ..quantizers.float8 import Float8CurrentScalingQuantizer
from ..quantizers.float8_block import Float8BlockQuantizer
from ..quantizers.identity import IdentityQuantizer
from ..quantizers.mxfp8 import MXFP8Quantizer
from ..quantizers.nvfp4 import NVFP4Quantizer

# The options of quantizers that do not change the format.
_OPTIONS_OF_QUANTIZERS: dict[type[Quantizer], tuple[str, ...]] = {
    IdentityQuantizer: ("bf16", "fp16", "fp32"),
    Float8CurrentScalingQuantizer: ("pow2", "eps", "delayed"),
    Float8BlockQuantizer: ("f32_scales", "eps"),
    MXFP8Quantizer: (),
    NVFP4Quantizer: ("rht", "sr", "4over6"),
    FormatQuantizer: ("sr",),
}


def variant(fmt: Format, *, element: str = "e4m3", two_d: bool = False, row_scaled: bool = False) -> Format | None:
    """The registered variant of a format with tiles, with an amax per row, or in E5M2; None if there is none.

    Both its name (``fmt`` with an ending) and its fields must fit.
    """
    name = fmt.name + "_2d" * two_d + "_row_scaled" * row_scaled + "_e5m2" * (element == "e5m2")
    if name == fmt.name:
        return fmt
    try:
        found = get_format(name)
    except KeyError:
        return None
    wanted = E5M2 if element == "e5m2" else fmt.element
    alike = found.scale_rule == fmt.scale_rule and found.block_length == fmt.block_length and found.element == wanted
    as_asked = (found.block_rows > 1) == two_d and (found.global_amax == "row") == row_scaled
    return found if alike and as_asked else None


class Registered:
    """One content of the registry. What follows from it is cached by this object, which is cheap to hash."""

    def __init__(self, all_formats: tuple[Format, ...]) -> None:
        self.formats = all_formats


_last_seen = Registered(())


def registered() -> Registered:
    """The present content of the registry: the same object as before if nothing was registered since."""
    global _last_seen
    present = tuple(formats())
    if present != _last_seen.formats:
        _last_seen = Registered(present)
    return _last_seen


def names_of_variants() -> Mapping[str, str]:
    """The registered formats that are variants of another, written with options: ``{"x_2d": "x(2d)"}``."""
    return _names_of_variants(registered())


@lru_cache(maxsize=16)
def _names_of_variants(known: Registered) -> Mapping[str, str]:
    found = {}
    for fmt in known.formats:
        for two_d, row_scaled, element in product((False, True), (False, True), ("e4m3", "e5m2")):
            options = ["2d"] * two_d + ["row_scaled"] * row_scaled + ["e5m2"] * (element == "e5m2")
            other = variant(fmt, element=element, two_d=two_d, row_scaled=row_scaled) if options else None
            if other is not None:
                found[other.name] = f"{fmt.name}({', '.join(options)})"
    return MappingProxyType(found)


def options_of_format(fmt: Format) -> frozenset[str]:
    """The names of all options that a format has."""
    found = set(_OPTIONS_OF_QUANTIZERS[quantizer_class(fmt)])
    if fmt.element == E4M3 and variant(fmt, element="e5m2") is not None:
        found |= {"e4m3", "e5m2"}
    if variant(fmt, two_d=True) is not None:
        found.add("2d")
    if variant(fmt, row_scaled=True) is not None:
        found.add("row_scaled")
    return frozenset(found)


@lru_cache(maxsize=256)
def quantizer_class(fmt: Format) -> type[Quantizer]:
    """The quantizer class for a format. For a variant of another format it is `FormatQuantizer`."""
    is_option = fmt.block_rows > 1 or fmt.global_amax == "row" or fmt.scale_bound != NVFP4Quantizer().nvfp4_e4m3_max
    return FormatQuantizer if is_option else type(quantizer_of(fmt))
