"""Formats and quantizers as plain data (what JSON can hold), and back.

Reading back only ever makes values of the classes listed here, from data that is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..formats import AnyElement, Element, Format, ScaleLayout, TableElement, get_format
from ..formats.dtypes import DType
from ..formats.written import changed_fields, from_fields
from ..quantizers.any_format import FormatQuantizer
from ..quantizers.base import Quantizer, make_quantizer
from ..quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from ..quantizers.float8_block import Float8BlockQuantizer
from ..quantizers.hybrid import HybridQuantizer
from ..quantizers.identity import IdentityQuantizer
from ..quantizers.mxfp8 import MXFP8Quantizer
from ..quantizers.nvfp4 import NVFP4Quantizer


def plain_format(fmt: Format) -> dict[str, Any]:
    """The fields that say something; in them, an element that is a table is known by having one."""
    return _plain_fields(fmt)


def _plain_fields(value: Any) -> dict[str, Any]:
    return {name: _plain_field(field) for name, field in changed_fields(value).items()}


def _plain_field(field: Any) -> Any:
    if isinstance(field, Element | TableElement | ScaleLayout):
        return _plain_fields(field)
    if isinstance(field, tuple):
        return [_plain_field(each) for each in field]
    if isinstance(field, float) and not math.isfinite(field):
        return str(field)  # JSON has no word for these
    return field


def format_from(plain: Mapping[str, Any]) -> Format:
    """A format of `plain_format`; one that is registered under another meaning is refused."""
    fields = _with_tuples(plain)
    if fields["element"] is not None:
        fields["element"] = _element_from(fields["element"])
    if "layout" in fields:
        fields["layout"] = from_fields(ScaleLayout.__name__, _with_tuples(fields["layout"]))
    fmt: Format = from_fields(Format.__name__, fields)
    try:
        known = get_format(fmt.name)
    except KeyError:
        return fmt
    if known != fmt:
        raise ValueError(f"the format {fmt.name!r} means something else in this crossgrain")
    return fmt


def _element_from(plain: Mapping[str, Any]) -> AnyElement:
    fields = _with_tuples(plain)
    if "table" in fields:
        fields["table"] = tuple(map(float, fields["table"]))
    element: AnyElement = from_fields((TableElement if "table" in fields else Element).__name__, fields)
    return element


def _with_tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}


def plain_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_from(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def plain_quantizer(quantizer: Quantizer | None) -> dict[str, Any] | None:
    """Class and options, or an error for quantizers that are not crossgrain's."""
    if quantizer is None:
        return None
    name = type(quantizer).__name__
    if type(quantizer) is not type(_examples().get(name)):
        raise TypeError(f"{name} is not one of crossgrain's quantizers, so it cannot be described in a file")
    return {"class": name, "options": {key: _plain(value) for key, value in quantizer.__getstate__().items()}}


def quantizer_from(plain: Mapping[str, Any] | None) -> Quantizer | None:
    if plain is None:
        return None
    example = _examples()[plain["class"]]
    options = {key: _value(value) for key, value in plain["options"].items()}
    if options.keys() - example.__getstate__().keys() or example.__getstate__().keys() - options.keys():
        raise ValueError(f"a {plain['class']} has other options than this crossgrain knows")
    return make_quantizer(type(example), options)


def _plain(value: Any) -> Any:
    if isinstance(value, DType):
        return {"DType": int(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": plain_dtype(value)}
    if isinstance(value, Format):
        return {"Format": plain_format(value)}
    if isinstance(value, Quantizer):
        return {"Quantizer": plain_quantizer(value)}
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() < 2:
        return {"float32": value.tolist()}
    raise TypeError(f"an option {value!r} of a quantizer cannot be described in a file")


def _value(plain: Any) -> Any:
    if not isinstance(plain, Mapping):
        return plain
    ((kind, content),) = plain.items()
    read: Any = {
        "DType": DType,
        "dtype": dtype_from,
        "Format": format_from,
        "Quantizer": quantizer_from,
        "float32": lambda numbers: torch.tensor(numbers, dtype=torch.float32),
    }[kind]
    return read(content)


@cache
def _examples() -> dict[str, Quantizer]:
    """A quantizer of every class, which shows its options."""
    e4m3 = DType.kFloat8E4M3
    made: list[Quantizer] = [
        Float8Quantizer(torch.ones(1), torch.zeros(1), e4m3),
        Float8CurrentScalingQuantizer(e4m3),
        Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True),
        MXFP8Quantizer(e4m3),
        NVFP4Quantizer(),
        FormatQuantizer("mxfp4"),
        IdentityQuantizer(),
        HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(e4m3), columnwise_quantizer=MXFP8Quantizer(e4m3)),
    ]
    return {type(quantizer).__name__: quantizer for quantizer in made}
