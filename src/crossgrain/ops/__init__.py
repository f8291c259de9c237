"""Fusible operations: small building blocks (GEMM, bias, activation, norm) that run as one autograd function.

Put operations into a `Sequential`. Neighbouring operations are fused where that saves work; results stay the same.
"""

from . import basic, fused
from .basic import *  # noqa: F403
from .basic import __all__ as _basic
from .context import OperationContext
from .fuser import (
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .linear import Linear
from .op import BasicOperation, FusedOperation, FusibleOperation
from .sequential import Sequential

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "Linear",
    "OperationContext",
    "OperationFuser",
    "Sequential",
    "basic",
    "fused",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
__all__ += _basic
