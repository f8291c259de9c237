"""`Scaling`: the kinds of scales that torch's ``scaled_mm`` multiplies, and which formats have them."""

from __future__ import annotations

import enum

import torch

from ...formats import E2M1, E4M3, E5M2, Format, TableElement


class Scaling(enum.Enum):
    """How the codes of an operand are scaled."""

    TENSOR = "FP8 with a scale per tensor"
    ROWS = "FP8 in blocks of 1x128"
    TILES = "FP8 in tiles of 128x128"
    MX = "MXFP8"
    NVFP4 = "NVFP4"

    @property
    def is_fp4(self) -> bool:
        """Whether a byte has two codes."""
        return self is Scaling.NVFP4

    @property
    def has_global_scale(self) -> bool:
        """Whether a single number scales the whole tensor."""
        return self in (Scaling.TENSOR, Scaling.NVFP4)

    @property
    def has_blocks_of_128(self) -> bool:
        """Whether 128 numbers along the summed dimension share an fp32 scale."""
        return self in (Scaling.ROWS, Scaling.TILES)


def scaling_of(fmt: Format) -> Scaling | None:
    """How ``scaled_mm`` would read a format; None if it cannot."""
    if fmt.element in (E4M3, E5M2):
        if fmt.block is None:
            return Scaling.TENSOR
        if fmt.scale_rule == "fp32":
            return {(1, 128): Scaling.ROWS, (128, 128): Scaling.TILES}.get(fmt.block)
        powers_of_two = fmt.scale_rule in ("e8m0_up", "e8m0_floor")
        return Scaling.MX if powers_of_two and _is_blocks_along_rows(fmt, 32) else None
    two_level = fmt.element == E2M1 and fmt.scale_element == E4M3 and fmt.global_amax == "tensor"
    return Scaling.NVFP4 if two_level and _is_blocks_along_rows(fmt, 16) else None


def why_not_native(fmt: Format) -> str:
    """Why ``scaled_mm`` cannot read a format for which `scaling_of` is None."""
    if fmt.is_identity:
        return "it is not quantized"
    if isinstance(fmt.element, TableElement):
        return f"tensor cores do not know {fmt.element.name} numbers"
    if fmt.scale_rule == "two_level" and fmt.global_amax == "row":
        return "scaled_mm takes one scale for the whole tensor, not one for each row"
    if fmt.scale_rule == "two_level" and fmt.scale_element != E4M3:
        return f"tensor cores read block scales in E4M3, not in {fmt.scale_element.name}"
    if fmt.element == E2M1 and fmt.block_length == 32:
        return (
            "torch multiplies MXFP4 only in builds with MSLK, which cannot be asked for, and its shape function "
            "refuses the scales that its kernel needs"
        )
    if fmt.element is not None and fmt.element.bits == 6:
        return "torch has no dtype for 6 bits"
    return f"scaled_mm has no blocks of {fmt.block_rows}x{fmt.block_length} with such scales"


def torch_dtype(fmt: Format) -> torch.dtype:
    """The dtype of torch for the codes of a format that `scaling_of` knows."""
    if fmt.element == E2M1:
        return torch.float4_e2m1fn_x2
    return torch.float8_e5m2 if fmt.element == E5M2 else torch.float8_e4m3fn


def _is_blocks_along_rows(fmt: Format, length: int) -> bool:
    """Whether each row of the operand has its own scales, also of tiles, for blocks of ``length`` numbers."""
    return fmt.block_length == length and (fmt.block_rows == 1 or fmt.layout.replicated)
