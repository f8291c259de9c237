"""Updates of quantized parameters that round away.

An optimizer without master weights adds its updates to what a quantized parameter decodes to. Where an
update is smaller than half the distance to the neighbouring number, writing the sum back changes nothing,
step after step: the model looks as if it trained, and does not. That is worth a warning.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .tensor import QuantizedTensor

_ARITHMETIC = frozenset(f"{name}_" for name in ("add", "sub", "mul", "div", "addcdiv", "addcmul", "lerp"))


def is_update(func: Any) -> bool:
    """Whether ``func`` is something that optimizers do to parameters in place."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("_fused_") or name.removeprefix("_foreach_") in _ARITHMETIC


def rounds_updates(tensor: QuantizedTensor) -> bool:
    """Whether updates of ``tensor`` may vanish for good: a parameter in few bits, rounded to nearest."""
    planes = tensor.planes()
    if not tensor._is_param or not planes or planes[0].format.is_identity:
        return False
    return not tensor._get_quantizer().encoding(planes[0].direction).stochastic


def warn_if_vanished(tensor: QuantizedTensor, before: Tensor) -> None:
    """Warn if most of what ``tensor`` decodes to is as it was."""
    unchanged = tensor._decoded(before.dtype, None) == before
    share = float(unchanged.float().mean()) if before.numel() else 0.0
    if share > 0.5:
        warnings.warn(
            f"an in-place update left {share:.0%} of a {type(tensor).__name__} parameter of shape "
            f"{list(tensor.shape)} as it was: it is smaller than what the format can tell apart. Keep float32 "
            "masters: crossgrain.optim.with_masters(torch.optim.AdamW, params, ...), or "
            "crossgrain.optim.FusedAdam(params, master_weights=True).",
            stacklevel=5,
        )
