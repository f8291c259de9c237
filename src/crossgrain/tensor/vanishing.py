"""Warn if updates of quantized parameters are lost by rounding.

An optimizer without master weights adds its update to the decoded parameter, and the sum is quantized again. If the
update is smaller than half the distance to the next number of the format, the parameter does not change, in any step:
the model seems to train, but does not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..runtime.host_and_device import tell_later
from ..runtime.logs import warn

if TYPE_CHECKING:
    from .tensor import QuantizedTensor

_ARITHMETIC = frozenset(f"{name}_" for name in ("add", "sub", "mul", "div", "addcdiv", "addcmul", "lerp"))


def is_update(func: Any) -> bool:
    """Whether ``func`` is an operation by which optimizers update parameters in place."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("_fused_") or name.removeprefix("_foreach_") in _ARITHMETIC


def rounds_updates(tensor: QuantizedTensor) -> bool:
    """Whether updates of ``tensor`` can be lost: it is a quantized parameter, or an alias, rounded to nearest."""
    planes = tensor.planes()
    if not (tensor._is_param or tensor._of_param) or not planes or planes[0].format.is_identity:
        return False
    return not tensor._get_quantizer().encoding(planes[0].direction).stochastic


def warn_if_vanished(tensor: QuantizedTensor, before: Tensor) -> None:
    """Warn if an update has left more than half of the numbers of ``tensor`` as they were."""
    if before.numel():
        unchanged = tensor._decoded(before.dtype, None) == before
        tell_later(unchanged.float().mean(), partial(_warn, type(tensor).__name__, list(tensor.shape)))


def _warn(kind: str, shape: list[int], share: float) -> None:
    """Warn if the ``share`` of numbers that an update left as they were is large. A GPU tells it a step later."""
    if share > 0.5:  # some numbers may stay in a normal step; more than half is a sign that updates are too small
        warn(
            __name__,
            f"an in-place update left {share:.0%} of a {kind} parameter of shape {shape} as it was: the update is "
            "smaller than the distance between numbers of the format. Keep float32 masters: "
            "crossgrain.optim.with_masters(torch.optim.AdamW, params, ...), or "
            "crossgrain.optim.FusedAdam(params, master_weights=True).",
            subject=(kind, *shape),  # the share is another one in every step
        )
