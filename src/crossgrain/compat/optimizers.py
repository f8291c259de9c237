"""`crossgrain.optim` under the module name of Transformer Engine."""

from ..optim import FusedAdam, FusedSGD
from ..optim.multi_tensor import (
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)

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
