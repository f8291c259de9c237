"""The basic operations. Each is one primitive, such as a GEMM, a bias or an activation."""

from .activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from .bias import Bias
from .collective import AllGather, AllReduce, ReduceScatter
from .extra import AddExtraInput, MakeExtraOutput
from .grouped_linear import GroupedLinear
from .linear import BasicLinear
from .normalization import L2Normalization, LayerNorm, RMSNorm
from .quantize import Quantize
from .scaled_activation import ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSReLU, ScaledSwiGLU
from .simple import ConstantScale, Dropout, Identity, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]
