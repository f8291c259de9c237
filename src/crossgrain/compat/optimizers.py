"""`crossgrain.optim` under the module name of Transformer Engine."""

from typing import Any

from torch.optim import Optimizer

from .. import optim
from ..optim.multi_tensor import (
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from .adapters.gradient_buffers import refuse_lost_places, warn_about_experts

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]


class _ForMegatron(Optimizer):
    """Tells of parameters that Megatron-core would gather wrongly, before anything is trained."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        warn_about_experts(param_group)
        refuse_lost_places(self.param_groups)


class FusedAdam(_ForMegatron, optim.FusedAdam):
    """`crossgrain.optim.FusedAdam`, which refuses parameters that Megatron-core would gather wrongly."""


class FusedSGD(_ForMegatron, optim.FusedSGD):
    """`crossgrain.optim.FusedSGD`, which refuses parameters that Megatron-core would gather wrongly."""
