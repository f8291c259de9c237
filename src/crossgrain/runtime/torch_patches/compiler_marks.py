"""Mark functions that `torch.compile` must not trace, without importing the compiler.

Why: ``torch.compiler.disable`` and ``torch.compiler.assume_constant_result`` import the whole compiler when they are
called, which takes longer than importing torch, and most programs never compile. Both only set attributes on a
function, by which the tracer recognises it. This module sets the same attributes. The compiler's own wrapper is made
when a marked function is called in a process that has loaded the compiler.

Tested with torch 2.13. If a version of torch uses other attributes, a compiled model traces functions that it should
not; the tests of compiled modules fail then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Decorator: the tracer calls the function once instead of tracing it. Its result is a constant of the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def eager_only(reason: str) -> Callable[[Function], Function]:
    """Decorator for functions that are not traced: they run between two graphs.

    Args:
        reason: why; it is in the message of the error with ``fullgraph=True``.
    """

    def decorated(function: Function) -> Function:
        disabled: list[Callable[..., Any]] = []  # filled once; a functools cache would be traced, with a warning

        @functools.wraps(function)
        def in_eager(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(function, reason=reason))
            return disabled[0](*args, **kwargs)

        in_eager._torchdynamo_disable = True  # type: ignore[attr-defined]
        in_eager._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        in_eager._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
        return in_eager  # type: ignore[return-value]

    return decorated
