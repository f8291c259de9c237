"""Check that the quantizers of one operand have the same configuration in all groups (experts) of a grouped layer.

A grouped GEMM has one format for each operand and direction. A factory is called for one group at a time and could
return different quantizers; this check finds them when they are made, before a kernel runs.
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
    """Check that all quantizers have the same class and configuration, in each direction.

    Args:
        quantizers: one for each group; None for a group without a quantizer.
        operand_name: name of the operand, for the message.

    Raises:
        ValueError: two of them differ.
    """
    if not quantizers:
        return
    first = quantizers[0]
    for group, quantizer in enumerate(quantizers[1:], start=1):
        difference = _difference(first, quantizer)
        if difference:
            raise ValueError(f"the quantizers of {operand_name} differ between group 0 and group {group}: {difference}")


def _difference(a: Quantizer | None, b: Quantizer | None) -> str:
    """The first difference in words; empty if there is none."""
    if a is None or b is None:
        return "" if a is b else "one of them has no quantizer"
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
    """Options by name, without scales and histories, which each group has itself, and without usages, which change."""
    if isinstance(quantizer, IdentityQuantizer):
        return {"dtype": quantizer.dtype}
    fields = quantizer._value_fields or [name for name, value in vars(quantizer).items() if isinstance(value, DType)]
    return {name: getattr(quantizer, name) for name in fields}
