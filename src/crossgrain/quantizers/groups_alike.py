"""The quantizers of one operand of all groups (experts) of a grouped layer: they have to be alike.

A grouped GEMM has one format for each operand and direction. Factories see one group at a time, so they
could answer differently; that is noticed when quantizers are made, not in a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..formats.dtypes import DType
from ..planes import Direction
from .base import Quantizer
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer


def validate_grouped_quantizer_list(quantizers: Sequence[Quantizer | None], *, operand_name: str = "operand") -> None:
    """Raise ValueError unless all are of one class and configuration, in each direction."""
    if not quantizers:
        return
    first = quantizers[0]
    for group, quantizer in enumerate(quantizers[1:], start=1):
        difference = _difference(first, quantizer)
        if difference:
            raise ValueError(f"the quantizers of {operand_name} differ between group 0 and group {group}: {difference}")


def _difference(a: Quantizer | None, b: Quantizer | None) -> str:
    """What is not the same, in words; empty if nothing."""
    if a is None or b is None:
        return "" if a is b else "one of them has none"
    if isinstance(a, HybridQuantizer) and isinstance(b, HybridQuantizer):
        if a.columnwise_source != b.columnwise_source:
            return f"columnwise_source {a.columnwise_source!r} and {b.columnwise_source!r}"
        for direction in Direction:
            inner = _difference(a.child(direction), b.child(direction))
            if inner:
                return f"{direction.value}, {inner}"
        return ""
    if type(a) is not type(b):
        return f"{type(a).__name__} and {type(b).__name__}"
    for name, value in _configuration(a).items():
        other = _configuration(b)[name]
        if value != other:
            return f"{type(a).__name__} with {name}={value!r} and {other!r}"
    return ""


def _configuration(quantizer: Quantizer) -> dict[str, Any]:
    """Options by name. Scales and histories are each group's own, usages change from step to step."""
    if isinstance(quantizer, IdentityQuantizer):
        return {"dtype": quantizer.dtype}
    fields = quantizer._value_fields or [name for name, value in vars(quantizer).items() if isinstance(value, DType)]
    return {name: getattr(quantizer, name) for name in fields}
