"""Saved tensors in host memory or on disk between forward and backward."""

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
