"""Find parameters that Megatron-core would gather from the wrong place of its gradient buffer.

With ``reuse_grad_buf_for_mxfp8_param_ag``, the only way that MXFP8 parameters have to the ranks of its distributed
optimizer, Megatron-core gathers all parameters, also those in bfloat16, through buffers in which each begins at a
multiple of 64 elements. It copies them from there as if there were no gaps: ``_ParamAndGradBucket.__init__`` adds up
sizes (``param_to_index``, megatron/core/distributed/param_and_grad_buffer.py, line 109 of 0.16.1). Whatever follows a
gap gets numbers of its neighbours.

It also empties the buffers when it has copied from them. If there are two optimizers, because experts are divided among
ranks, each of them gathers and copies all buffers (``DistributedOptimizer.step_with_ready_grads``, called by that of
``ChainedOptimizer``, megatron/core/optimizer/optimizer.py, line 1246): the second one finds those of the first empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ...quantizers.mxfp8 import MXFP8Tensor
from ...runtime.logs import warn


def refuse_lost_places(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise if MXFP8 parameters, or parameters beside them, are followed by a gap in their gradient buffer.

    Args:
        groups: parameter groups of an optimizer. Gradients in a buffer are ``param.main_grad``.

    Raises:
        RuntimeError: there are such parameters. Nothing has been trained yet.
    """
    params = [param for group in groups for param in group["params"] if isinstance(_gradient(param), Tensor)]
    if not any(isinstance(param, MXFP8Tensor) for param in params):
        return
    buffers: dict[int, list[Tensor]] = {}
    for param in params:
        buffers.setdefault(_gradient(param).untyped_storage().data_ptr(), []).append(param)
    found = [param for buffer in buffers.values() for param in _before_gaps(buffer)]
    if found:
        shapes = sorted({f"{list(param.shape)} ({param.numel()} elements)" for param in found})
        raise RuntimeError(
            f"{len(found)} parameters do not fill multiples of 64 elements of their gradient buffer: "
            f"{', '.join(shapes[:5])}{', ...' if len(shapes) > 5 else ''}. Megatron-core (0.16.1) gathers parameters "
            "through this buffer if some are kept in MXFP8 (reuse_grad_buf_for_mxfp8_param_ag). It forgets the gaps "
            "behind such parameters, and would give those that follow wrong numbers, without an error. Choose sizes "
            "(hidden_size, ffn_hidden_size) with which every parameter has a multiple of 64 elements, or do not keep "
            "parameters in MXFP8 (fp8_param_gather=False)"
        )


def warn_about_experts(group: Mapping[str, Any]) -> None:
    """Warn if a parameter group of Megatron-core has experts in MXFP8 that are divided among ranks.

    Args:
        group: parameters of an optimizer. Megatron-core marks such experts with ``is_expert_parallel``.
    """
    kept = [param for param in group["params"] if isinstance(param, MXFP8Tensor) and _gradient(param) is not None]
    if kept and group.get("is_expert_parallel"):
        warn(
            __name__,
            f"{len(kept)} experts are kept in MXFP8 and have an optimizer of their own. Megatron-core (0.16.1) then "
            "sets all other parameters to zero in every step of its distributed optimizer, unless overlap_param_gather "
            "is on: both optimizers gather all parameters through the gradient buffers, and the first one leaves them "
            "empty. Do not keep parameters in MXFP8 (fp8_param_gather=False), or do not divide experts among ranks "
            "(expert_model_parallel_size=1)",
        )


def _before_gaps(buffer: list[Tensor]) -> list[Tensor]:
    """Parameters of a buffer that are followed by a gap. The last one of a bucket, which is harmless, looks alike."""
    in_order = sorted(buffer, key=lambda param: _gradient(param).storage_offset())
    return [
        param
        for param, following in itertools.pairwise(in_order)
        if param.numel() % 64 and _gradient(following).storage_offset() > _end(param)
    ]


def _end(param: Tensor) -> int:
    return int(_gradient(param).storage_offset()) + param.numel()


def _gradient(param: Any) -> Any:
    return getattr(param, "main_grad", None)
