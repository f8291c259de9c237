"""`crossgrain.optim` under the module name of Transformer Engine."""

from typing import Any

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
from .adapters.gradient_buffers import refuse_lost_places

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


class FusedAdam(optim.FusedAdam):
    """`crossgrain.optim.FusedAdam`, which refuses parameters that Megatron-core would gather wrongly."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        refuse_lost_places(self.param_groups)


class FusedSGD(optim.FusedSGD):
    """`crossgrain.optim.FusedSGD`, which refuses parameters that Megatron-core would gather wrongly."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        refuse_lost_places(self.param_groups)
