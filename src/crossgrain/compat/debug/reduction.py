"""Over which ranks statistics are merged."""

from __future__ import annotations

from typing import Any

import nvdlfw_inspect.api as debug_api

from ..adapters.debug_state import TEDebugState
from .buffers import THIS_RANK, Ranks


def ranks_of(tensor_name: str, tp_group: Any, tp_size: int | None = None) -> Ranks:
    """The ranks over which the statistics of a tensor are merged.

    Weights are merged over the ranks that share the layer, unless `set_weight_tensor_tp_group_reduce` says otherwise;
    all others over the group of ``debug_api.set_tensor_reduction_group``, without it over all ranks.
    """
    if tensor_name != "weight":
        return Ranks(group=debug_api.get_tensor_reduction_group())
    shared = TEDebugState.weight_tensor_tp_group_reduce and tp_group is not None and tp_size != 1
    return Ranks(group=tp_group) if shared else THIS_RANK


def get_reduction_params(tensor_name: str, tp_group: Any, tp_size: int | None = None) -> tuple[bool, Any, bool]:
    """The same for features of users.

    Returns:
        Whether nothing is merged, the process group, and whether microbatches are added up.
    """
    ranks = ranks_of(tensor_name, tp_group, tp_size)
    return not ranks.everywhere, ranks.group, tensor_name != "weight"
