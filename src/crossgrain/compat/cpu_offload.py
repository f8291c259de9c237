"""`crossgrain.offload` under the name the field knows."""

from ..offload import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadableLayerState,
    get_cpu_offload_context,
    mark_not_offload,
    start_offload,
)

__all__ = [
    "DefaultOffloadSynchronizer",
    "ManualOffloadSynchronizer",
    "OffloadableLayerState",
    "get_cpu_offload_context",
    "mark_not_offload",
    "start_offload",
]
