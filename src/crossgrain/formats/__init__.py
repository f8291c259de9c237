"""Formats as frozen data: elements, block shapes and scale rules, and the registry of formats by name."""

from .built_in import BUILT_IN
from .element import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, UE5M3, Element
from .format import (
    DEFAULT_SIGN_MASK,
    HADAMARD_SIZE,
    IDENTITY,
    AnyElement,
    Format,
    ScaleLayout,
    fp8_block_format,
    fp8_format,
    mxfp8_format,
    nvfp4_format,
    ocp_mx_format,
)
from .registry import format_table, formats, get_element, get_format, register_format
from .table_element import TableElement
from .written import NewerVersionError

__all__ = [
    "BUILT_IN",
    "DEFAULT_SIGN_MASK",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "HADAMARD_SIZE",
    "IDENTITY",
    "UE5M3",
    "AnyElement",
    "Element",
    "Format",
    "NewerVersionError",
    "ScaleLayout",
    "TableElement",
    "format_table",
    "formats",
    "fp8_block_format",
    "fp8_format",
    "get_element",
    "get_format",
    "mxfp8_format",
    "nvfp4_format",
    "ocp_mx_format",
    "register_format",
]
