"""What may be loaded into a quantized parameter.

High precision is quantized, and planes of the parameter's own formats are taken as bytes. Planes of other
formats would be decoded and rounded a second time, which nobody should get without asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..planes import COLUMNWISE, ROWWISE, Direction
from ..runtime.settings import settings
from .storage import QuantizedTensorStorage


def check_formats(parameters: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise if loading ``values``, by name after ``prefix``, would round a second time and nobody asked for it."""
    if settings.requantize_on_load:
        return
    problems = []
    for name, parameter in parameters.items():
        value = values.get(prefix + name)
        if isinstance(parameter, QuantizedTensorStorage) and isinstance(value, QuantizedTensorStorage):
            direction = rounded_again(parameter, value)
            if direction is not None:
                problems.append(
                    f"{prefix}{name}: the checkpoint holds {_formats_of(value)}, the model {_formats_of(parameter)}, "
                    f"so its {direction.value} plane would be rounded a second time"
                )
    if problems:
        raise ValueError(
            "; ".join(problems) + ". To load it nevertheless: crossgrain.files.load_state_dict(..., requantize=True), "
            "or crossgrain.settings.override(requantize_on_load=True)"
        )


def rounded_again(dst: QuantizedTensorStorage, src: QuantizedTensorStorage) -> Direction | None:
    """The first direction of ``dst`` that ``src`` could only give by decoding and rounding; None: nothing is lost."""
    held = [direction for direction in Direction if src.get_usages()[direction.value]]
    if not held or src._formats[held[0]].is_identity:  # what it decodes to was never rounded
        return None
    for direction in Direction:
        fmt = dst._formats.get(direction)
        if fmt is None or fmt.is_identity or not dst.get_usages()[direction.value]:
            continue
        if direction is COLUMNWISE and _makes_columns_from_rows(dst) and ROWWISE in held:
            continue  # by definition what the rows decode to, rounded
        plane = src.plane(direction) or src._derivable(direction)
        if plane is None or plane.format != fmt:
            return direction
    return None


def _makes_columns_from_rows(tensor: QuantizedTensorStorage) -> bool:
    quantizer = tensor._quantizer
    return quantizer is not None and quantizer.derives_columns and tensor.plane(ROWWISE) is not None


def _formats_of(tensor: QuantizedTensorStorage) -> str:
    """``mxfp8``, or ``rowwise mxfp8, columnwise nvfp4``."""
    usages = tensor.get_usages()
    named = {direction: tensor._formats[direction].name for direction in Direction if usages[direction.value]}
    if len(named) == 2 and len(set(named.values())) == 1:
        return named[ROWWISE]
    return ", ".join(f"{direction.value} {name}" for direction, name in named.items())
