"""`crossgrain.offload` under the module name of Transformer Engine."""

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
