"""Products of planes, which operands may meet, and the pointwise mathematics around them (norms, activations)."""

from .product import gemm

__all__ = ["gemm"]
