"""What compiled kernels know: elements and formats as values of their own, written out.

Being built in does not make a format known here, and nothing here follows from the definitions in ``formats``. A
format that differs from its entry in any field, under whatever name, is the reference's; so is every new one.
Kernels compute with these elements, not with those of ``formats``, so what is compiled cannot change under them.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from functools import lru_cache
from typing import Any

from ...formats import Element, Format, ScaleLayout

E4M3 = Element("e4m3", 4, 3, bias=7, max=448.0, specials="nan")
E5M2 = Element("e5m2", 5, 2, bias=15, max=57344.0, specials="ieee")
E2M1 = Element("e2m1", 2, 1, bias=1, max=6.0)
E2M3 = Element("e2m3", 2, 3, bias=1, max=7.5)
E3M2 = Element("e3m2", 3, 2, bias=3, max=28.0)

ELEMENTS: dict[str, Element] = {element.name: element for element in (E4M3, E5M2, E2M1, E2M3, E3M2)}

_TILE = ScaleLayout(pad=(128, 4))
_REPLICATED = ScaleLayout(pad=(128, 4), replicated=True)
_NVFP4: dict[str, Any] = {
    "scale_rule": "two_level",
    "layout": _TILE,
    "global_amax": "tensor",
    "scale_element": E4M3,
}
_NVFP4_2D: dict[str, Any] = {**_NVFP4, "layout": _REPLICATED}
_BLOCK: dict[str, Any] = {"block": (1, 128), "layout": ScaleLayout(pad=(4, 1), transposed=True), "ragged": True}
_BLOCK_2D: dict[str, Any] = {"block": (128, 128), "layout": ScaleLayout(pad=(1, 4)), "ragged": True}
_MXFP8: dict[str, Any] = {"block": (1, 32), "scale_rule": "e8m0_up", "layout": _TILE, "transposes": False}
_MXFP8_2D: dict[str, Any] = {**_MXFP8, "block": (32, 32), "layout": _REPLICATED}
_OCP: dict[str, Any] = {"block": (1, 32), "scale_rule": "e8m0_floor", "layout": _TILE}

NVFP4 = Format("nvfp4", E2M1, (1, 16), **_NVFP4)

FORMATS: frozenset[Format] = frozenset(
    (
        Format("fp8", E4M3, ragged=True),
        Format("fp8_e5m2", E5M2, ragged=True),
        Format("fp8_block", E4M3, **_BLOCK),
        Format("fp8_block_e5m2", E5M2, **_BLOCK),
        Format("fp8_block_2d", E4M3, **_BLOCK_2D),
        Format("fp8_block_2d_e5m2", E5M2, **_BLOCK_2D),
        Format("mxfp8", E4M3, **_MXFP8),
        Format("mxfp8_e5m2", E5M2, **_MXFP8),
        Format("mxfp8_2d", E4M3, **_MXFP8_2D),
        Format("mxfp8_2d_e5m2", E5M2, **_MXFP8_2D),
        NVFP4,
        Format("nvfp4_2d", E2M1, (16, 16), **_NVFP4_2D),
        Format("nvfp4_row_scaled", E2M1, (1, 16), **{**_NVFP4, "global_amax": "row"}),
        Format("nvfp4_max256", E2M1, (1, 16), **_NVFP4, scale_bound=256),
        Format("nvfp4_2d_max256", E2M1, (16, 16), **_NVFP4_2D, scale_bound=256),
        Format("mxfp4", E2M1, **_OCP),
        Format("mxfp6_e2m3", E2M3, **_OCP),
        Format("mxfp6_e3m2", E3M2, **_OCP),
    )
)


@lru_cache(maxsize=1024)
def is_known(fmt: Format) -> bool:
    """Whether there are kernels for just this format; NVFP4 may have any rotation."""
    return fmt in FORMATS or (fmt.rotation is not None and fmt == NVFP4.with_rotation(fmt.rotation))


def data_digest(element: Element) -> str:
    """A digest of all that a kernel may ask of an element: its fields, what follows from them, and its numbers.

    What follows is included because code outside of kernels works it out.
    """
    derived = [name for name, member in vars(Element).items() if isinstance(member, property)]
    asked = {name: getattr(element, name) for name in (*(field.name for field in fields(element)), *sorted(derived))}
    return hashlib.sha256(repr((asked, element.values())).encode()).hexdigest()[:16]
