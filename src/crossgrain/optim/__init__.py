"""Optimizers that keep float32 masters of quantized parameters."""

from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD
from .with_masters import with_masters

__all__ = ["FusedAdam", "FusedSGD", "with_masters"]
