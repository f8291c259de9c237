"""Tables of numbers on devices. On GPUs they are kept: to copy one takes longer than to use it, and may wait."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from ...runtime.host_and_device import on_device

Numbers = tuple[int, ...] | tuple[float, ...]


def constant(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers. It must not be written to, because it may be that of another call."""
    if device.type != "cuda" or detect_fake_mode() is not None:  # fake tensors belong to one mode
        return torch.tensor(numbers, dtype=dtype, device=device)
    if torch.cuda.is_current_stream_capturing():  # its memory would be that of the graph, and empty until a replay
        return on_device(numbers, device, dtype)
    return _kept(numbers, dtype, device)


@lru_cache(maxsize=512)
def _kept(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        table = on_device(numbers, device, dtype)
    torch.cuda.current_stream(device).synchronize()  # once: other streams read it, too
    return table
