"""The arithmetic of delayed scaling: the scale of a step is computed from the amaxes of earlier steps.

The state of n tensors is ``scale[n]`` and ``amax_history[length, n]``. Row 0 of the history collects the amaxes of the
current step. The update at the end of a step appends them to the history and sets row 0 to zero.
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
    """Compute scales as ``fp8_max * 2**-margin / amax``, rounded once.

    A tensor whose amax is 0 or not finite keeps its old scale.
    """
    return _where_usable(amax, quotient(fp8_max * 2.0**-margin, amax), old_scale)


def scale_from_amax_reciprocal(amax: Tensor, old_scale: Tensor, fp8_max: float, margin: int = 0) -> Tensor:
    """Compute scales as ``(1 / amax) * fp8_max / 2**margin``, as the unfused update does.

    It rounds twice, so the last bit may differ from `scale_from_amax`.
    """
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
    """End a step: append its amaxes to the history and compute new scales. Both tensors are changed in place.

    Args:
        amax_history: the history [length, n].
        scale: the scales [n].
        fp8_max: the largest number of the FP8 type.
        margin: divide scales by ``2**margin``.
        algorithm: how an amax follows from the history: "max", "most_recent", or a function that maps
            ``history[length, n]`` to ``amax[n]``.
        scale_rule: a function that maps (``amax[n]``, ``old scale[n]``) to ``scale[n]``; None for the usual formula.
        reduced_amax: row 0 after a reduction over ranks. Where it is 0, the local row is used.
        fused: a tensor that was not used in this step (its amax is 0) keeps its history. Otherwise, and always with a
            function as ``algorithm`` or ``scale_rule``, a 0 is appended for it and older entries move out.
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
