"""Store optimizer states in fewer bits. The dtype says how:

    float32    unchanged
    bfloat16   rounded
    float16    divided by a scale for each tensor, so that the largest magnitude is half of float16's maximum
    uint8      FP8 (E4M3) with a scale for each tensor, as a `Float8Tensor`

If ranks have shards of a state, the scale is that of the whole state. ``groups`` are the process groups of these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..formats.dtypes import DType
from ..quantizers.float8 import Float8CurrentScalingQuantizer, Float8Tensor
from ..runtime.collectives import maximise_
from ..tensor import QuantizedTensor
from ..tensor.sharding import reduce_over

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)

_FLOAT16_RANGE = torch.finfo(torch.float16).max / 2


def zero_state(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a state of zeros, stored as ``dtype``."""
    if dtype != torch.uint8:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device, columnwise=False)
    state: Tensor = quantizer.quantize(torch.zeros(tuple(shape) or (1,), device=device))
    return state


def unscaled(state: Tensor, scale: Tensor | None) -> Tensor:
    """Return the state in float32. It is the state itself if that is float32."""
    if isinstance(state, QuantizedTensor):
        return state.dequantize(dtype=torch.float32)
    return state.to(torch.float32) if scale is None else state.to(torch.float32).mul_(scale)


def store(value: Tensor, state: Tensor, scale: Tensor | None, groups: Any = None) -> None:
    """Write a float32 ``value`` to ``state``, and its scale to ``scale`` if there is one."""
    if isinstance(state, QuantizedTensor):
        if groups is not None:
            reduce_over(state._get_quantizer(), groups)  # which copies do not have
        state.quantize_(value.reshape(state.shape))
    elif scale is None:
        state.copy_(value)
    else:
        amax = kernels.amax(value)
        if groups is not None:
            maximise_(amax, groups)
        scale.copy_(amax / _FLOAT16_RANGE)
        state.copy_(value * torch.where(scale > 0, scale.reciprocal(), 0.0))


def own_scale(state: Tensor) -> Tensor | None:
    """The scale of an FP8 state, which cannot be computed exactly from its numbers; None for other states."""
    return state._scale_inv.clone() if isinstance(state, Float8Tensor) and state._scale_inv is not None else None


def take_scale(state: Tensor, scale: Tensor) -> None:
    """Set the saved scale of an FP8 state after storing it, so that it has the same bytes as before."""
    if isinstance(state, Float8Tensor) and state._scale_inv is not None:
        state._scale_inv.copy_(scale)
