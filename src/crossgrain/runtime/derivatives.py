"""Functions of autograd whose gradients can be differentiated again only if that is right.

Their backward computes with planes, kernels and collectives that autograd does not see. A gradient that was made with
``create_graph=True`` would silently lack the terms of all these. So it can be used, but differentiating it raises,
unless the function can also compute its gradients in operations that autograd sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable_once(
    name: str | Callable[[Any], str], unless: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for ``backward`` of a `torch.autograd.Function`.

    Args:
        name: what the error calls the function: a text, or a function of ``ctx`` that returns it.
        unless: computes the same as ``backward`` in operations that autograd sees; returns None where it cannot. It
            is used if a graph is asked for.
    """

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():  # nobody asked for a graph
                return backward(ctx, *grads)
            visible = None if unless is None else unless(ctx, *grads)
            if visible is not None:
                return visible
            with torch.no_grad():
                found = backward(ctx, *grads)
            message = (
                f"{name if isinstance(name, str) else name(ctx)}: its gradients cannot be differentiated again, as "
                "create_graph=True asks for, because autograd does not see how they are computed. Leave it out of what "
                "is differentiated twice, or use the layer of torch.nn there."
            )
            several = isinstance(found, tuple)
            saved = [tensor for tensor in ctx.saved_tensors if tensor is not None and tensor.requires_grad]
            sources = [*(grad for grad in grads if isinstance(grad, Tensor) and grad.requires_grad), *saved]
            sources += [*_leaves(ctx), *getattr(ctx, "entrances", ())]
            refusing = tuple(_refusing(value, message, sources) for value in (found if several else (found,)))
            return refusing if several else refusing[0]

        return once

    return decorated


def entrances(*tensors: Tensor | None) -> Sequence[Tensor]:
    """Empty tensors that lead to what ``tensors`` come from, those of them that are not leaves.

    A function keeps them as ``ctx.entrances``, if it does not save these tensors themselves: `torch.autograd.grad` may
    ask for the second derivative by one of them, and autograd gives no other way from a node to what lies before it.
    """
    inner = [tensor for tensor in tensors if type(tensor) is Tensor and tensor.grad_fn is not None and tensor.dim()]
    if not inner:
        return ()
    with torch.enable_grad():
        return [torch.narrow_copy(tensor, 0, 0, 0) for tensor in inner]


def _leaves(node: Any) -> list[Tensor]:
    """The leaves that a node of autograd leads to."""
    found, seen, ahead = [], {node}, [node]
    while ahead:
        for following, _ in ahead.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
                if hasattr(following, "variable"):
                    found.append(following.variable)
    return found


def _refusing(value: Any, message: str, sources: Sequence[Tensor]) -> Any:
    """``value`` with a graph that leads to ``sources``: `torch.autograd.grad` visits only what leads to its inputs."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return _Refuses.apply(value.detach().requires_grad_(), message, *sources)


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, message: str, *sources: Tensor) -> Tensor:
        ctx.message = message
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ctx.message)
