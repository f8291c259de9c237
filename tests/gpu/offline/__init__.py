"""Compiles Triton kernels for GPUs that are not here, and reads what the compilers made of them."""

from .compile import TARGETS, Constant, build
from .result import Built, inexact

__all__ = ["TARGETS", "Built", "Constant", "build", "inexact"]
