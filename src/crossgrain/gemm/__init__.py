"""GEMMs of planes, which operands can be multiplied, and norms and activations."""

from .product import gemm

__all__ = ["gemm"]
