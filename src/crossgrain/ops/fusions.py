"""Apply fusions to a list of operations.

A fusion is a function ``fn(ops, *, recipe) -> ops``. It gets the operations in the order of forward, and returns them
with some neighbouring operations replaced by a `FusedOperation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..recipe import Recipe
from .op import FusedOperation, FusibleOperation

FusionFunction = Callable[..., list[FusibleOperation]]


def apply_fusions(
    functions: Sequence[FusionFunction], ops: list[FusibleOperation], recipe: Recipe | None
) -> list[FusibleOperation]:
    """Apply all fusions, in order.

    Raises:
        RuntimeError: a fusion changed the list of basic operations or their order.
    """
    before = [basic for op in ops for basic in op.as_basic_ops()]
    for function in functions:
        ops = list(function(ops, recipe=recipe))
        after = [basic for op in ops for basic in op.as_basic_ops()]
        if len(after) != len(before) or any(a is not b for a, b in zip(after, before, strict=True)):
            name = getattr(function, "__name__", repr(function))
            raise RuntimeError(
                f"the fusion {name} turned [{_names(before)}] into [{_names(ops)}], which consists of the basic "
                f"operations [{_names(after)}]. A fusion must keep all basic operations and their order"
            )
    return ops


def _names(ops: Sequence[FusibleOperation]) -> str:
    return ", ".join(type(op).__name__ for op in ops)


def fuse_windows(
    ops: list[FusibleOperation], width: int, fused: Callable[[list[FusibleOperation]], FusedOperation | None]
) -> list[FusibleOperation]:
    """Replace ``width`` neighbouring operations by ``fused(them)`` wherever that is not None."""
    result: list[FusibleOperation] = []
    start = 0
    while start < len(ops):
        window = ops[start : start + width]
        replacement = fused(window) if len(window) == width else None
        result.append(ops[start] if replacement is None else replacement)
        start += 1 if replacement is None else width
    return result
