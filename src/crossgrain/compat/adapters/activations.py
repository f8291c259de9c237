"""Convert between the two layouts of a gated activation: halves one after the other, or interleaved."""

from ...gemm.activations import deinterleaved as deinterleave_glu_tensor
from ...gemm.activations import interleaved as interleave_glu_tensor

__all__ = ["deinterleave_glu_tensor", "interleave_glu_tensor"]
