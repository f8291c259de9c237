"""Optimizers for quantized parameters. They keep a float32 master copy of each parameter and update that.

- `FusedAdam` and `FusedSGD` use torch's fused kernels.
- `with_masters` adds master weights to any torch optimizer.
"""

from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD
from .with_masters import with_masters

__all__ = ["FusedAdam", "FusedSGD", "with_masters"]
