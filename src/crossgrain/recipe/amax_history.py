"""Delayed scaling: this step's scale comes from the amaxes of earlier steps.

The state of n tensors is ``scale[n]`` and ``amax_history[length, n]``. Row 0 collects the amaxes of the
current step; the update at the end of a step moves them to the end of the window and clears row 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..kernels.reference.scaling import quotient

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]
ScaleRule = Callable[[Tensor, Tensor], Tensor]

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
    scale_rule: ScaleRule | None = None,
    reduced_amax: Tensor | None = None,
    fused: bool = True,
) -> None:
    """End a step, in place.

    By the ``fused`` rule a tensor that saw nothing this step (amax 0) keeps its history as it is. By the
    other, and with a callable ``algorithm`` (history [length, n] -> amax [n]) or a ``scale_rule`` (amax [n],
    old scale [n] -> scale [n]), the history rolls in any case: a 0 is shifted into the window, older entries
    age out, and the last bit of a scale may differ.
    ``reduced_amax`` is row 0 after a reduction over ranks; where it is 0 the local row counts.
    """
    fused = fused and not callable(algorithm) and scale_rule is None
    last = amax_history[0].clone()
    if reduced_amax is not None:
        last = torch.where(reduced_amax != 0, reduced_amax, last)
    rolled = torch.cat((amax_history[1:], last.unsqueeze(0)))
    if callable(algorithm):
        amax = algorithm(torch.cat((last.unsqueeze(0), amax_history[1:])))
    else:
        amax = rolled.amax(dim=0) if algorithm == "max" else last
    rolled[0] = 0.0
    if fused:
        seen = last != 0
        scale.copy_(scale_from_amax(torch.where(seen, amax, 0.0), scale, fp8_max, margin))
        amax_history.copy_(torch.where(seen, rolled, amax_history))
    else:
        if scale_rule is not None:
            scale.copy_(scale_rule(amax, scale))
        else:
            scale.copy_(scale_from_amax_reciprocal(amax, scale, fp8_max, margin))
        amax_history.copy_(rolled)
