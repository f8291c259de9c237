"""Delayed scaling: this step's scale comes from the amaxes of earlier steps.

The state of n tensors is ``scale[n]`` and ``amax_history[length, n]``. Row 0 collects the amaxes of the
current step; the update at the end of a step moves them to the end of the window and clears row 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from .kernels.reference.scaling import quotient

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]

_FP32_MAX = torch.finfo(torch.float32).max


def scale_from_amax(amax: Tensor, old_scale: Tensor, fp8_max: float, margin: int = 0) -> Tensor:
    """New scales: ``fp8_max * 2**-margin / amax``, one rounding; the old one where amax is 0 or not finite."""
    return _where_usable(amax, quotient(fp8_max * 2.0**-margin, amax), old_scale)


def scale_from_amax_reciprocal(amax: Tensor, old_scale: Tensor, fp8_max: float, margin: int = 0) -> Tensor:
    """The same in the arithmetic of the unfused update, ``(1 / amax) * fp8_max``: two roundings."""
    return _where_usable(amax, amax.reciprocal() * fp8_max / 2.0**margin, old_scale)


def _where_usable(amax: Tensor, scale: Tensor, old_scale: Tensor) -> Tensor:
    return torch.where((amax > 0) & amax.isfinite(), scale.clamp(max=_FP32_MAX), old_scale)


def update_history_and_scale(
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: float,
    *,
    margin: int = 0,
    algorithm: AmaxAlgorithm = "max",
    reduced_amax: Tensor | None = None,
) -> None:
    """End a step, in place: the rule of the fused kernels.

    A tensor that saw nothing this step (amax 0) keeps its history as it is. ``reduced_amax`` is row 0
    after a reduction over ranks; where it is 0 the local row counts. A callable ``algorithm`` gets the
    history [length, n] and follows `update_history_and_scale_always` instead.
    """
    if callable(algorithm):
        update_history_and_scale_always(
            amax_history, scale, fp8_max, margin=margin, algorithm=algorithm, reduced_amax=reduced_amax
        )
        return
    last = _last_amax(amax_history, reduced_amax)
    seen = last != 0
    rolled = amax_history.roll(-1, dims=0)
    rolled[-1] = last
    amax = rolled.amax(dim=0) if algorithm == "max" else last
    rolled[0] = 0.0
    scale.copy_(scale_from_amax(torch.where(seen, amax, 0.0), scale, fp8_max, margin))
    amax_history.copy_(torch.where(seen, rolled, amax_history))


def update_history_and_scale_always(
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: float,
    *,
    margin: int = 0,
    algorithm: AmaxAlgorithm = "max",
    reduced_amax: Tensor | None = None,
) -> None:
    """End a step, in place: the rule of the unfused update, which rolls the history in any case.

    A step with amax 0 then shifts a 0 into the window and older entries age out. Scales can differ
    from the fused rule's in the last bit.
    """
    history = amax_history.clone()
    history[0] = _last_amax(amax_history, reduced_amax)
    if callable(algorithm):
        amax = algorithm(history)
    elif algorithm == "max":
        amax = history.amax(dim=0)
    else:
        amax = history[0].clone()
    scale.copy_(scale_from_amax_reciprocal(amax, scale, fp8_max, margin))
    rolled = history.roll(-1, dims=0)
    rolled[0] = 0.0
    amax_history.copy_(rolled)


def _last_amax(amax_history: Tensor, reduced_amax: Tensor | None) -> Tensor:
    last = amax_history[0].clone()
    return last if reduced_amax is None else torch.where(reduced_amax != 0, reduced_amax, last)
