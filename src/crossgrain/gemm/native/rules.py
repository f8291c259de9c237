"""Which operands ``scaled_mm`` of torch 2.13 and the hardware can multiply, each rule with its reason in words.

The rules are those of torch's C++ code (``ScaledBlas.cpp``, ``ScaledBlasUtils.cpp``, ``CUDABlas.cpp``), of its shape
function for fake tensors, which is stricter in some places, and of cuBLASLt where torch leaves it to fail: rows of 16
bytes, and compute capability 10.0 for MXFP8 and NVFP4. What depends on the memory of a plane is not a rule: codes that
do not lie as needed are copied (see `arguments`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...formats import E4M3, E5M2, Format
from ...planes import Plane
from .gpu import Gpu
from .scaling import Scaling, scaling_of, why_not_native

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)

_OCP_AMD = ("gfx950", "gfx1200", "gfx1201", "gfx1250")  # with FP8 numbers of the OCP standard, which crossgrain stores


def refuses(a: Plane, b: Plane, gpu: Gpu | None) -> str | None:
    """Why the operands of a GEMM cannot be multiplied natively; None if they can.

    Args:
        a: the first operand, [rows, summed dimension].
        b: the second operand, [columns, summed dimension].
        gpu: the GPU; None if there is none.
    """
    if a.data.device != b.data.device:
        return f"the operands are on different devices, {a.data.device} and {b.data.device}"
    if gpu is None:
        return f"the operands are on the device {a.data.device.type}, which is not a GPU"
    return refuses_formats(a.format, b.format, a.operand_shape, b.operand_shape, gpu)


@lru_cache(maxsize=4096)
def refuses_formats(a: Format, b: Format, a_shape: tuple[int, int], b_shape: tuple[int, int], gpu: Gpu) -> str | None:
    """`refuses` for operands of these formats and shapes. Nothing else matters."""
    scalings = []
    for name, fmt in (("first", a), ("second", b)):
        scaling = scaling_of(fmt)
        if scaling is None:
            return f"the {name} operand is {fmt.name}: {why_not_native(fmt)}"
        scalings.append(scaling)
    return (
        _pair_problem(a, b, scalings)
        or _hardware_problem(scalings, gpu)
        or _element_problem(a, b, scalings, gpu)
        or _size_problem(scalings, a_shape, b_shape)
    )


def needs_epilogue(
    fmt: Format, out_dtype: torch.dtype, bias: Tensor | None = None, *, accumulate: bool = False, alpha: float = 1.0
) -> str | None:
    """Why ``scaled_mm`` cannot finish a GEMM, so that its fp32 product goes through `kernels.epilogue`; None if it can.

    Args:
        fmt: the format of an operand that `refuses` does not refuse.
        out_dtype: dtype of the result.
        bias: added to the result.
        accumulate: add to what is in the result.
        alpha: multiplies the product.
    """
    scaling = scaling_of(fmt)
    assert scaling is not None
    if accumulate:
        return "scaled_mm cannot add to a result"
    if alpha != 1.0 and not scaling.has_global_scale:
        return f"scaled_mm has no factor for {scaling.value}"
    if out_dtype not in _RESULTS:
        return f"scaled_mm has no results in {out_dtype}"
    if bias is None:
        return None
    if out_dtype == torch.float32:
        return "scaled_mm takes no bias with a result in torch.float32"
    if bias.dtype != out_dtype:
        return f"scaled_mm would round the bias from {bias.dtype} to the dtype of the result, {out_dtype}"
    if not bias.is_contiguous():
        return "scaled_mm reads the bias as contiguous memory"
    if scaling.has_blocks_of_128:
        return "it is not known whether cuBLASLt adds a bias to products of blocks of 128"
    return None


def _pair_problem(a: Format, b: Format, scalings: list[Scaling]) -> str | None:
    first, second = scalings
    if first is second is Scaling.TILES:
        return "scaled_mm multiplies tiles of 128x128 by blocks of 1x128, but not tiles by tiles"
    if first is not second and not (first.has_blocks_of_128 and second.has_blocks_of_128):
        return f"scaled_mm cannot multiply {first.value} by {second.value}"
    if a.rotation != b.rotation:
        return "the operands are rotated differently, so they have to be decoded"
    return None


def _hardware_problem(scalings: list[Scaling], gpu: Gpu) -> str | None:
    if not gpu.has_kernels:
        return "this build of torch has no scaled_mm for GPUs"
    name = scalings[0].value
    if gpu.arch is not None:
        return _amd_problem(scalings[0], gpu.arch)
    if scalings[0] is Scaling.TENSOR:
        enough = gpu.capability >= (9, 0) or gpu.capability == (8, 9)
        return None if enough else f"{name} needs compute capability 8.9 or from 9.0 on, this is {gpu}"
    if scalings[0].has_blocks_of_128:
        if gpu.capability[0] != 9:
            return f"{name}: scaled_mm has blocks of 128 only for compute capability 9.0, this is {gpu}"
        return _version_problem(name, gpu, (12, 9))
    if gpu.capability < (10, 0):
        return f"{name} needs compute capability 10.0, this is {gpu}"
    return _version_problem(name, gpu, (12, 8))


def _version_problem(name: str, gpu: Gpu, needed: tuple[int, int]) -> str | None:
    if gpu.cuda >= needed:
        return None
    have, need = (".".join(map(str, version)) for version in (gpu.cuda, needed))
    return f"{name} needs a torch that was built for CUDA {need}, this one was for CUDA {have}"


def _amd_problem(scaling: Scaling, arch: str) -> str | None:
    if scaling is not Scaling.TENSOR:
        return f"{scaling.value}: on AMD GPUs only FP8 with a scale per tensor is multiplied natively, this is {arch}"
    if arch == "gfx942":
        return "gfx942 multiplies FP8 numbers of another kind (fnuz) than those that are stored (OCP)"
    return None if arch in _OCP_AMD else f"{scaling.value}: scaled_mm does not know {arch}"


def _element_problem(a: Format, b: Format, scalings: list[Scaling], gpu: Gpu) -> str | None:
    elements = (a.element, b.element)
    if elements == (E5M2, E5M2) and gpu.arch is None:
        return "cuBLASLt cannot multiply E5M2 by E5M2"
    if scalings[0].has_blocks_of_128 and elements != (E4M3, E4M3):
        return "scaled_mm takes blocks of 128 only in E4M3"
    return None


def _size_problem(scalings: list[Scaling], a_shape: tuple[int, int], b_shape: tuple[int, int]) -> str | None:
    (rows, inner), (columns, _) = a_shape, b_shape
    if rows == 0 or columns == 0 or inner == 0:
        return f"there is nothing to multiply: [{rows}, {inner}] by [{inner}, {columns}]"
    codes = 32 if scalings[0].is_fp4 else 16  # in 16 bytes
    if inner % codes:
        return f"it sums over {inner} numbers, and rows must have a multiple of {codes}: 16 bytes"
    if columns % 16:
        return f"the result has {columns} columns, and their number must be a multiple of 16"
    if not scalings[0].has_blocks_of_128:
        return None
    if inner % 128:
        return f"it sums over {inner} numbers, and scaled_mm wants whole blocks of 128"
    for scaling, outer, name in ((scalings[0], rows, "rows"), (scalings[1], columns, "columns")):
        multiple = 128 if scaling is Scaling.TILES else 4  # 4 scales are 16 bytes
        if outer % multiple:
            return f"the result has {outer} {name}, and {scaling.value} must be a multiple of {multiple} there"
    return None
