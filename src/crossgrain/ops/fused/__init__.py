"""The fused operations, each of which does the work of several basic ones, and their registration."""

from ..fuser import register_backward_fusion, register_forward_fusion
from .backward import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    fuse_backward_activation_bias,
    fuse_backward_add_rmsnorm,
    fuse_backward_linear_add,
    fuse_backward_linear_scale,
)
from .forward_linear import (
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    fuse_forward_linear_bias_activation,
    fuse_forward_linear_bias_add,
    fuse_forward_linear_scale_add,
)

__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
]

# Longer runs first: a linear layer that is followed by a bias and an addition is one operation, not two.
register_forward_fusion(fuse_forward_linear_bias_add)
register_forward_fusion(fuse_forward_linear_bias_activation)
register_forward_fusion(fuse_forward_linear_scale_add)

register_backward_fusion(fuse_backward_linear_add)
register_backward_fusion(fuse_backward_linear_scale)
register_backward_fusion(fuse_backward_activation_bias)
register_backward_fusion(fuse_backward_add_rmsnorm)
