"""Constants of Transformer Engine: block sizes, names of masks and modes, indices of tensors."""

from __future__ import annotations

import enum

import torch.distributed as dist

from ...formats.dtypes import DType, TE_DType, TE_DType_To_Torch
from ...nn.attention.masks import MASK_TYPES

__all__ = [
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "AttnBiasTypes",
    "AttnMaskTypes",
    "AttnTypes",
    "DType",
    "FP8BwdTensorIdx",
    "FP8FwdTensorIdx",
    "GemmParallelModes",
    "LayerTypes",
    "TE_DType",
    "TE_DType_To_Torch",
    "dist_group_type",
]

MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16

AttnMaskTypes = MASK_TYPES
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)

dist_group_type = dist.ProcessGroup


class FP8FwdTensorIdx(enum.IntEnum):
    """Indices of forward tensors in the lists of a module: three for each GEMM."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensorIdx(enum.IntEnum):
    """Indices of backward tensors in the lists of a module: two for each GEMM."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5
