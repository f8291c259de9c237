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
            raise ValueError(
                f"GroupedLinear: the {operand_name} quantizers of expert 0 and expert {group} {difference}. All "
                "experts need the same quantizers"
            )


def _difference(a: Quantizer | None, b: Quantizer | None) -> str:
    """The first difference in words; empty if there is none. Clients of Transformer Engine look for some of them."""
    names = f"{type(a).__name__} and {type(b).__name__}"
    if a is None or b is None:
        return "" if a is b else f"mix None and concrete quantizers: {names}"
    if isinstance(a, HybridQuantizer) != isinstance(b, HybridQuantizer):
        return f"mix HybridQuantizer and non-hybrid quantizers: {names}"
    if _identities(a) != _identities(b):
        return f"mix Identity-backed and quantized directions: {_identities(a)} and {_identities(b)}"
    if isinstance(a, HybridQuantizer) and isinstance(b, HybridQuantizer):
        for direction in Direction:
            inner = _backend_difference(a.child(direction), b.child(direction), direction.value)
            if inner:
                return inner
        if a.columnwise_source != b.columnwise_source:
            return f"have mixed columnwise source policies: {a.columnwise_source!r} and {b.columnwise_source!r}"
        return ""
    return _backend_difference(a, b, "plain")


def _identities(quantizer: Quantizer) -> tuple[bool, ...]:
    """Whether the quantizer keeps numbers as they are, by direction."""
    children = [quantizer.child(d) for d in Direction] if isinstance(quantizer, HybridQuantizer) else [quantizer] * 2
    return tuple(isinstance(child, IdentityQuantizer) for child in children)


def _backend_difference(a: Quantizer, b: Quantizer, direction: str) -> str:
    if type(a) is not type(b):
        return f"use incompatible {direction} backend families: {type(a).__name__} and {type(b).__name__}"
    for name, value in _configuration(a).items():
        other = _configuration(b)[name]
        if value != other:
            return (
                f"use incompatible {direction} backend configurations: {type(a).__name__} with {name}={value!r} and "
                f"{other!r}"
            )
    return ""


def _configuration(quantizer: Quantizer) -> dict[str, Any]:
    """Options by name, without scales and histories, which each group has itself, and without usages, which change."""
    if isinstance(quantizer, IdentityQuantizer):
        return {"dtype": quantizer.dtype}
    fields = quantizer._value_fields or [name for name, value in vars(quantizer).items() if isinstance(value, DType)]
    return {name: getattr(quantizer, name) for name in fields}
