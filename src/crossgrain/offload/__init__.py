"""Move the tensors that autograd saves to host memory or to disk between forward and backward.

Use `offload` as a context manager around the forward pass. `get_cpu_offload_context` does the same layer by layer, with
the arguments of Transformer Engine.
"""

from .context import Offload, OffloadStats, offload
from .errors import OffloadError, OverLimitError
from .layers import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadableLayerState,
    get_cpu_offload_context,
    start_offload,
)
from .staying import mark_not_offload

__all__ = [
    "DefaultOffloadSynchronizer",
    "ManualOffloadSynchronizer",
    "Offload",
    "OffloadError",
    "OffloadStats",
    "OffloadableLayerState",
    "OverLimitError",
    "get_cpu_offload_context",
    "mark_not_offload",
    "offload",
    "start_offload",
]
