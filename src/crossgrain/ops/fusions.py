"""Which neighbours are fused: an ordered list of functions for each pass.

A fusion is a function ``fn(ops, *, recipe) -> ops``. It gets the operations in the order of forward and
returns them with some neighbours replaced by a `FusedOperation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..recipe import Recipe
from .op import FusedOperation, FusibleOperation

FusionFunction = Callable[..., list[FusibleOperation]]


def apply_fusions(
    functions: Sequence[FusionFunction], ops: list[FusibleOperation], recipe: Recipe | None
) -> list[FusibleOperation]:
    """``ops`` after all fusions, which are checked to stand for the same basic operations."""
    before = [basic for op in ops for basic in op.as_basic_ops()]
    for function in functions:
        ops = list(function(ops, recipe=recipe))
        after = [basic for op in ops for basic in op.as_basic_ops()]
        if len(after) != len(before) or any(a is not b for a, b in zip(after, before, strict=True)):
            name = getattr(function, "__name__", repr(function))
            raise RuntimeError(
                f"the fusion {name} turned [{_names(before)}] into [{_names(ops)}], which stands for "
                f"[{_names(after)}]: a fusion replaces neighbours and keeps their order"
            )
    return ops


def _names(ops: Sequence[FusibleOperation]) -> str:
    return ", ".join(type(op).__name__ for op in ops)


def fuse_windows(
    ops: list[FusibleOperation], width: int, fused: Callable[[list[FusibleOperation]], FusedOperation | None]
) -> list[FusibleOperation]:
    """Slide a window of ``width`` neighbours over ``ops``; where ``fused(window)`` is not None, it replaces them."""
    result: list[FusibleOperation] = []
    start = 0
    while start < len(ops):
        window = ops[start : start + width]
        replacement = fused(window) if len(window) == width else None
        result.append(ops[start] if replacement is None else replacement)
        start += 1 if replacement is None else width
    return result
