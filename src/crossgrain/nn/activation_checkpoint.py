"""`checkpoint`: activation recomputation. Intermediate results are not kept, but computed again in backward.

    y = crossgrain.checkpoint(block, x, use_reentrant=False)

Loss and gradients are those of ``block(x)``, bit for bit. ``torch.utils.checkpoint.checkpoint`` gives the same result;
this function also replays trackers of random states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.utils._pytree import tree_map_only

from ..recipe.context import active, this_pass

ContextFn = Callable[[], tuple[Any, Any]]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)`` without keeping its intermediate results, and call it again in backward.

    Args:
        function: the function or module to call.
        *args: its arguments.
        use_reentrant: use torch's older implementation, which computes gradients of all inputs or none, and does not
            support ``context_fn`` and ``debug``.
        distribute_saved_activations: supported only with a ``tp_group`` of one rank.
        tp_group: the process group of ``distribute_saved_activations``.
        get_rng_state_tracker: returns a tracker of random states besides torch's generator; they are replayed too.
        preserve_rng_state: restore torch's generator in backward. If False, dropout draws other numbers in backward;
            stochastic rounding is replayed all the same.
        context_fn: as in ``torch.utils.checkpoint.checkpoint``.
        determinism_check: as in ``torch.utils.checkpoint.checkpoint``.
        debug: as in ``torch.utils.checkpoint.checkpoint``.
        **kwargs: keyword arguments of ``function``.

    Returns:
        What ``function`` returns.

    Examples:
        >>> layer = cg.Linear(32, 32)
        >>> x = torch.randn(32, 32, requires_grad=True)
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = cg.checkpoint(layer, x)
        >>> y.sum().backward()  # runs forward again
        >>> x.grad.shape
        torch.Size([32, 32])
    """
    _refuse_distributed(distribute_saved_activations, tp_group)
    names, count = tuple(kwargs), len(args)
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    first_states = None if tracker is None else tracker.get_states()
    passes = iter([True])

    def run(*flat: Any) -> Any:
        again = next(passes, False) is False
        if tracker is None or not again:
            return _apart(function(*flat[:count], **dict(zip(names, flat[count:], strict=True))))
        now = tracker.get_states()
        tracker.set_states(first_states)
        try:
            return _apart(function(*flat[:count], **dict(zip(names, flat[count:], strict=True))))
        finally:
            tracker.set_states(now)

    # All arguments by position: gradients of a reentrant checkpoint reach no others.
    return torch.utils.checkpoint.checkpoint(
        run,
        *args,
        *kwargs.values(),
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=torch.utils.checkpoint.noop_context_fn if context_fn is None else context_fn,
        determinism_check=determinism_check,
        debug=debug,
    )


def _apart(outputs: Any) -> Any:
    """Return the outputs, with parameters among them replaced by copies.

    A reentrant checkpoint makes its outputs part of its own graph. If a parameter is returned, such as a bias that is
    added later, it would no longer be a leaf, and backward would recurse without end.
    """
    return tree_map_only(torch.Tensor, lambda t: t.clone() if t.is_leaf and t.requires_grad else t, outputs)


def _refuse_distributed(distribute: bool, group: Any) -> None:
    if not distribute:
        return
    if group is None:
        raise ValueError("checkpoint: distribute_saved_activations=True needs the tp_group to distribute over")
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        raise NotImplementedError(
            "checkpoint: distribute_saved_activations is not supported with more than one rank in tp_group; pass False"
        )


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether the code runs inside a checkpoint, in its first pass or recomputed, and modules quantize.

    Examples:
        >>> cg.is_fp8_activation_recompute_enabled()
        False
    """
    this = this_pass()
    return active().enabled and (bool(this.recorded) or this.recomputes)


def in_fp8_activation_recompute_phase() -> bool:
    """Whether the code is being recomputed in backward by a checkpoint.

    Examples:
        >>> cg.in_fp8_activation_recompute_phase()
        False
    """
    return this_pass().recomputes
