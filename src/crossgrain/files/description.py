"""Convert formats and quantizers to plain data that JSON can hold, and back.

Reading data back creates only objects of the classes listed in this file, and checks the data first, so a file
cannot make the reader run other code.
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
    """The fields of a format that differ from their defaults, as a dict that JSON can hold."""
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
    """Rebuild a format from the dict made by `plain_format`.

    Raises:
        ValueError: a different format is already registered under the same name.
    """
    fields = _with_tuples(plain)
    if fields["element"] is not None:
        fields["element"] = _element_from(fields["element"])
    if "scale_element" in fields:
        fields["scale_element"] = _element_from(fields["scale_element"])
    if "layout" in fields:
        fields["layout"] = from_fields(ScaleLayout.__name__, _with_tuples(fields["layout"]))
    fmt: Format = from_fields(Format.__name__, fields)
    try:
        known = get_format(fmt.name)
    except KeyError:
        return fmt
    if known != fmt:
        raise ValueError(
            f"the file describes a format named {fmt.name!r}, but a different format is registered under that name here"
        )
    return fmt


def _element_from(plain: Mapping[str, Any]) -> AnyElement:
    fields = _with_tuples(plain)
    if "table" in fields:
        fields["table"] = tuple(map(float, fields["table"]))
    element: AnyElement = from_fields((TableElement if "table" in fields else Element).__name__, fields)
    return element


def _with_tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists into tuples: JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}


def plain_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_from(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


def plain_quantizer(quantizer: Quantizer | None) -> dict[str, Any] | None:
    """Class name and options of a quantizer.

    Raises:
        TypeError: the quantizer is not of a class of crossgrain.
    """
    if quantizer is None:
        return None
    name = type(quantizer).__name__
    if type(quantizer) is not type(_examples().get(name)):
        raise TypeError(
            f"{name} is not one of crossgrain's quantizer classes; only tensors of crossgrain's own quantizers can be "
            "saved"
        )
    return {"class": name, "options": {key: _plain(value) for key, value in quantizer.__getstate__().items()}}


def quantizer_from(plain: Mapping[str, Any] | None) -> Quantizer | None:
    """Rebuild a quantizer from the dict made by `plain_quantizer`."""
    if plain is None:
        return None
    example = _examples()[plain["class"]]
    options = {key: _value(value) for key, value in plain["options"].items()}
    known = example.__getstate__().keys()
    required = {key for key in known if not hasattr(type(example), key)}  # what was added later has a default there
    if options.keys() - known or required - options.keys():
        raise ValueError(
            f"the file describes a {plain['class']} with options {sorted(options)}, but this version of crossgrain has "
            f"{sorted(known)}"
        )
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
    raise TypeError(f"a quantizer has the option value {value!r} of type {type(value).__name__}, which cannot be saved")


def _value(plain: Any) -> Any:
    if not isinstance(plain, Mapping):
        return plain
    ((kind, content),) = plain.items()
    read: Any = {
        "DType": DType,
        "dtype": dtype_from,
        "Format": format_from,
        "Quantizer": quantizer_from,
        "float32": lambda numbers: torch.tensor(numbers, dtype=torch.float32, device="cpu"),
    }[kind]
    return read(content)


@cache
def _examples() -> dict[str, Quantizer]:
    """One quantizer of every class, to look up which options the class has."""
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
