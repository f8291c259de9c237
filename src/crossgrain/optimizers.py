"""The optimizers under the name that Transformer Engine has for the module."""

from .optim import FusedAdam, FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
