"""Activation recomputation: a function whose intermediate results are not kept, but computed again in backward.

    y = crossgrain.checkpoint(block, x, use_reentrant=False)

Loss and gradients are those of ``block(x)``, bit for bit. ``torch.utils.checkpoint.checkpoint`` gives the same; this
one also knows about trackers of random states.
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
    """``function(*args, **kwargs)``, computed again in backward.

    ``use_reentrant``                 torch's older way: gradients of all or nothing, no ``context_fn`` or ``debug``
    ``get_rng_state_tracker``         returns random states beside torch's own generator, which are replayed too
    ``preserve_rng_state``            off: what draws random numbers itself, such as dropout, draws others in backward;
                                      stochastic rounding does not
    ``context_fn``, ``determinism_check``, ``debug``  as in torch
    ``distribute_saved_activations``  only with a ``tp_group`` of one rank, where there is nothing to distribute
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
    """Outputs, of which parameters are copies.

    A reentrant checkpoint makes its outputs part of its own graph. A parameter, such as a bias that is returned to be
    added later, would no longer be a leaf, and backward, which computes it again, would find itself without end.
    """
    return tree_map_only(torch.Tensor, lambda t: t.clone() if t.is_leaf and t.requires_grad else t, outputs)


def _refuse_distributed(distribute: bool, group: Any) -> None:
    if not distribute:
        return
    if group is None:
        raise ValueError("checkpoint: distribute_saved_activations needs the tp_group to distribute over")
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        raise NotImplementedError("checkpoint: one process holds the whole layer, also its saved activations")


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether this is part of a checkpoint, in its first pass or again, and modules quantize."""
    this = this_pass()
    return active().enabled and (bool(this.recorded) or this.recomputes)


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this is computed again in backward by a checkpoint."""
    return this_pass().recomputes
