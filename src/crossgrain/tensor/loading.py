"""Which values can be loaded into a quantized parameter.

Values in high precision are quantized, and planes in the formats of the parameter are copied as bytes. Planes in other
formats would have to be decoded and rounded a second time, which must be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..planes import COLUMNWISE, ROWWISE, Direction
from ..runtime.settings import settings
from .storage import QuantizedTensorStorage


def check_formats(parameters: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Check that loading does not round numbers a second time, unless ``settings.requantize_on_load`` allows it.

    Args:
        parameters: the parameters of the model, by name.
        values: the values to load; their names begin with ``prefix``.
        prefix: what the names of values have before the names of parameters.

    Raises:
        ValueError: a value is in another format than its parameter.
    """
    if settings.requantize_on_load:
        return
    problems = []
    for name, parameter in parameters.items():
        value = values.get(prefix + name)
        if isinstance(parameter, QuantizedTensorStorage) and isinstance(value, QuantizedTensorStorage):
            direction = rounded_again(parameter, value)
            if direction is not None:
                problems.append(
                    f"{prefix}{name}: the checkpoint has {_formats_of(value)}, the model has {_formats_of(parameter)}, "
                    f"so its {direction.value} plane would be rounded a second time"
                )
    if problems:
        raise ValueError(
            "; ".join(problems) + ". To load it anyway, use crossgrain.files.load_state_dict(..., requantize=True), "
            "or crossgrain.settings.override(requantize_on_load=True)"
        )


def rounded_again(dst: QuantizedTensorStorage, src: QuantizedTensorStorage) -> Direction | None:
    """The first direction of ``dst`` that needs decoding ``src`` and rounding again; None if there is none."""
    held = [direction for direction in Direction if src.get_usages()[direction.value]]
    if not held or src._formats[held[0]].is_identity:  # its numbers were never rounded
        return None
    for direction in Direction:
        fmt = dst._formats.get(direction)
        if fmt is None or fmt.is_identity or not dst.get_usages()[direction.value]:
            continue
        if direction is COLUMNWISE and _makes_columns_from_rows(dst) and ROWWISE in held:
            continue  # its columns are always made by rounding the decoded rows
        plane = src._plane_for(direction, fmt)
        if plane is None or plane.format != fmt:
            return direction
    return None


def _makes_columns_from_rows(tensor: QuantizedTensorStorage) -> bool:
    quantizer = tensor._quantizer
    return quantizer is not None and quantizer.derives_columns and tensor.plane(ROWWISE) is not None


def _formats_of(tensor: QuantizedTensorStorage) -> str:
    """The formats in words: ``mxfp8``, or ``rowwise mxfp8, columnwise nvfp4``."""
    usages = tensor.get_usages()
    named = {direction: tensor._formats[direction].name for direction in Direction if usages[direction.value]}
    if len(named) == 2 and len(set(named.values())) == 1:
        return named[ROWWISE]
    return ", ".join(f"{direction.value} {name}" for direction, name in named.items())
