"""A twin of torch's ``scaled_mm`` for GPUs, in plain torch: it checks what the C++ code checks, and multiplies.

It is written from torch's sources and cuBLAS's documentation and shares no code with crossgrain. It decodes codes and
scales with torch's own dtypes, undoes the swizzling by its own arithmetic, and adds up in float64, so that a wrong
layout, scale or operand gives wrong numbers. Everything that torch or cuBLASLt would refuse raises `Refused`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = torch.float4_e2m1fn_x2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Refused(Exception):
    """torch or cuBLASLt would refuse a call."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise Refused(message)


def up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


@dataclass
class Twin:
    """``scaled_mm`` of an NVIDIA GPU. It remembers what it was called with."""

    capability: tuple[int, int]
    calls: list[str] = field(default_factory=list)

    def new_interface(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: list[Tensor],
        recipe_a: list[ScalingType],
        scale_b: list[Tensor],
        recipe_b: list[ScalingType],
        swizzle_a: list[SwizzleType],
        swizzle_b: list[SwizzleType],
        bias: Tensor | None = None,
        output_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """`torch.nn.functional.scaled_mm`."""
        self._check_common(mat_a, mat_b, bias, output_dtype, [*scale_a, *scale_b])
        kind = self._kind(mat_a, mat_b, (scale_a, recipe_a), (scale_b, recipe_b))
        swizzles = {"mxfp8": 1, "nvfp4": 2}.get(kind)
        if swizzles is not None:
            for each in (swizzle_a, swizzle_b):
                check(len(each) == swizzles, f"{kind} needs {swizzles} swizzles, got {len(each)}")
                check(each[0] == SwizzleType.SWIZZLE_32_4_4, "scales must be swizzled to SWIZZLE_32_4_4")
        self.calls.append(kind)
        scales = (scale_a[0], recipe_a[0]), (scale_b[0], recipe_b[0])
        alpha = scale_a[1] * scale_b[1] if kind == "nvfp4" else None
        return _multiplied(mat_a, mat_b, *scales, alpha, bias, output_dtype)

    def old_interface(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """`torch._scaled_mm`, of which only blocks of 1x32 are here."""
        self._check_common(mat_a, mat_b, bias, out_dtype, [scale_a, scale_b])
        check(self.capability >= (10, 0), "no MXFP8 below capability 10.0")
        check(mat_a.dtype in FP8 and mat_b.dtype in FP8, "blocks of 1x32 are of FP8 numbers")
        self._check_block_scales(mat_a.shape, mat_b.shape, scale_a, scale_b, torch.float8_e8m0fnu, 32)
        self.calls.append("mxfp8, old interface")
        blocks = ScalingType.BlockWise1x32
        return _multiplied(mat_a, mat_b, (scale_a, blocks), (scale_b, blocks), None, bias, out_dtype)

    def _check_common(
        self, mat_a: Tensor, mat_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, scales: list[Tensor]
    ) -> None:
        check(self.capability >= (9, 0) or self.capability == (8, 9), "scaled_mm needs capability 8.9 or 9.0")
        check(mat_a.dim() == 2 and mat_b.dim() == 2, "operands must be matrices")
        check(mat_a.shape[1] == mat_b.shape[0], "shapes cannot be multiplied")
        check(min(*mat_a.shape, *mat_b.shape) > 0, "there is nothing to multiply")
        for dtype in (mat_a.dtype, mat_b.dtype):
            check(dtype in FP8 or dtype == FP4, f"{dtype} is not FP8 or FP4")
        check((mat_a.dtype == FP4) == (mat_b.dtype == FP4), "FP8 cannot be multiplied by FP4")
        check({mat_a.dtype, mat_b.dtype} != {torch.float8_e5m2}, "E5M2 by E5M2 is not supported")
        check(mat_a.shape[1] % 16 == 0, "rows of codes must be multiples of 16 bytes")
        check(mat_b.shape[1] % 16 == 0, "the number of columns must be a multiple of 16")
        check(mat_a.stride(1) == 1 and mat_a.stride(0) > 1, f"a must be row-major, has strides {mat_a.stride()}")
        check(mat_b.stride(0) == 1 and mat_b.stride(1) > 1, f"b must be column-major, has strides {mat_b.stride()}")
        for matrix, distance in ((mat_a, mat_a.stride(0)), (mat_b, mat_b.stride(1))):
            check(distance % 16 == 0, "rows must begin at multiples of 16 bytes")
            check(matrix.data_ptr() % 16 == 0, "codes must begin at a multiple of 16 bytes")
            check(distance >= mat_a.shape[1], "rows must not overlap")
        for scale in scales:
            check(scale.device == mat_a.device, "scales must be on the device of the operands")
        check(out_dtype in (torch.bfloat16, torch.float16, torch.float32), f"no results in {out_dtype}")
        if bias is not None:
            check(out_dtype != torch.float32, "no bias with a float32 result")
            check(bias.dtype == out_dtype, "the bias must have the dtype of the result")
            check(bias.numel() == mat_b.shape[1] and bias.is_contiguous(), "the bias must be a vector of columns")

    def _kind(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scaling_a: tuple[list[Tensor], list[ScalingType]],
        scaling_b: tuple[list[Tensor], list[ScalingType]],
    ) -> str:
        """Which kernel of torch takes the arguments, whose scales are checked."""
        (scale_a, recipe_a), (scale_b, recipe_b) = scaling_a, scaling_b
        check(len(scale_a) == len(recipe_a) and len(scale_b) == len(recipe_b), "a recipe for each scale")
        shapes, fp8 = (mat_a.shape, mat_b.shape), mat_a.dtype in FP8
        e4m3 = mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
        recipes = (recipe_a, recipe_b)
        if recipes == ([ScalingType.TensorWise],) * 2 and fp8:
            for scale in (*scale_a, *scale_b):
                check(scale.numel() == 1 and scale.dtype == torch.float32, "one float32 scale for each operand")
            return "fp8"
        if recipes == ([ScalingType.BlockWise1x32],) * 2 and e4m3:
            check(self.capability >= (10, 0), "no MXFP8 below capability 10.0")
            self._check_block_scales(*shapes, scale_a[0], scale_b[0], torch.float8_e8m0fnu, 32)
            return "mxfp8"
        if recipes == ([ScalingType.BlockWise1x16, ScalingType.TensorWise],) * 2 and not fp8:
            check(self.capability >= (10, 0), "no NVFP4 below capability 10.0")
            self._check_block_scales(*shapes, scale_a[0], scale_b[0], torch.float8_e4m3fn, 16)
            for scale in (scale_a[1], scale_b[1]):
                check(scale.numel() == 1 and scale.dtype == torch.float32, "global scales must be single float32")
            return "nvfp4"
        blocks = {ScalingType.BlockWise1x128, ScalingType.BlockWise128x128}
        known = len(recipe_a) == len(recipe_b) == 1 and recipe_a[0] in blocks and recipe_b[0] in blocks
        tiles = known and recipe_a[0] == recipe_b[0] == ScalingType.BlockWise128x128
        check(known and e4m3 and not tiles, f"no kernel for {recipes} and {mat_a.dtype}, {mat_b.dtype}")
        check(self.capability[0] == 9, "blocks of 128 only with capability 9.0")
        _check_scales_of_128(scale_a[0], recipe_a[0], mat_a.shape[0], mat_a.shape[1])
        _check_scales_of_128(scale_b[0], recipe_b[0], mat_b.shape[1], mat_b.shape[0])
        return "fp8 blocks"

    def _check_block_scales(
        self, a: torch.Size, b: torch.Size, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, block: int
    ) -> None:
        inner = a[1] * (2 if block == 16 else 1)
        for scale, outer in ((scale_a, a[0]), (scale_b, b[1])):
            count = up(outer, 128) * up(-(-inner // block), 4)
            check(scale.numel() == count, f"{count} scales are needed, there are {scale.numel()}")
            check(scale.dtype == dtype, f"scales must be {dtype}, are {scale.dtype}")
            check(scale.is_contiguous(), "scales must be contiguous")


def _check_scales_of_128(scale: Tensor, recipe: ScalingType, outer: int, inner: int) -> None:
    check(scale.dtype == torch.float32, "scales must be float32")
    check(inner % 128 == 0, "whole blocks of 128")
    if recipe == ScalingType.BlockWise1x128:
        shape, distance = (outer, inner // 128), outer
        check(outer % 4 == 0, "scales must lie at multiples of 16 bytes")
    else:
        check(outer % 128 == 0, "whole tiles of 128")
        distance = up(inner // 128, 4)
        shape = (distance, outer // 128)
    check(tuple(scale.shape) == shape, f"scales must have shape {shape}, have {tuple(scale.shape)}")
    fits = scale.stride(0) == 1 and (scale.stride(1) == distance or (scale.shape[1] == 1 and scale.stride(1) == 1))
    check(fits, f"scales must have strides (1, {distance}), have {scale.stride()}")


# ---- numbers ------------------------------------------------------------------------------------------


def unswizzled(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales [rows, blocks] in float64 from the layout SWIZZLE_32_4_4, by the address of each of them."""
    i, j = torch.arange(rows).view(-1, 1), torch.arange(blocks).view(1, -1)
    tile = (i // 128) * (up(blocks, 4) // 4) + j // 4
    address = tile * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
    return scales.to(torch.float64).reshape(-1)[address]


def _numbers(matrix: Tensor) -> Tensor:
    """The float64 numbers of codes [rows, bytes]."""
    if matrix.dtype != FP4:
        return matrix.to(torch.float64)
    codes = matrix.contiguous().view(torch.uint8)
    both = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(codes.shape[0], -1)
    return torch.tensor(E2M1, dtype=torch.float64)[both.long()]


def _scaled(matrix: Tensor, scale: Tensor, recipe: ScalingType) -> Tensor:
    """The float64 numbers [rows, summed dimension] of an operand with its scales, except those that come at the end."""
    numbers = _numbers(matrix)
    rows, inner = numbers.shape
    if recipe == ScalingType.TensorWise:
        return numbers
    if recipe == ScalingType.BlockWise1x128:
        return numbers * scale.double().repeat_interleave(128, 1)
    if recipe == ScalingType.BlockWise128x128:
        tiles = scale.t()[:, : inner // 128].double()
        return numbers * tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)
    block = 32 if recipe == ScalingType.BlockWise1x32 else 16
    return numbers * unswizzled(scale, rows, inner // block).repeat_interleave(block, 1)


def _multiplied(
    mat_a: Tensor,
    mat_b: Tensor,
    scaling_a: tuple[Tensor, ScalingType],
    scaling_b: tuple[Tensor, ScalingType],
    alpha: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Sums in float64, rounded to fp32, scaled in fp32, with the bias, rounded to the result."""
    sums = _scaled(mat_a, *scaling_a) @ _scaled(mat_b.t(), *scaling_b).t()
    result = sums.to(torch.float32)
    if scaling_a[1] == ScalingType.TensorWise:
        alpha = scaling_a[0] * scaling_b[0]
    if alpha is not None:
        result = result * alpha
    if bias is not None:
        result = result + bias.to(torch.float32)
    return result.to(out_dtype)
