"""`decode_kernel`: the numbers of a plane, in fp32, bf16 or fp16."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import (
    FROM_E4M3,
    FROM_E5M2,
    bits_of,
    element_values,
    hardware_fp4_values,
    hardware_fp8_values,
    rounded_to_bf16,
)
from .scales import block_scale_values, decode_factor
from .sixteens import joined, rows_of_sixteen, sixteen_of_rows, unrotated

STORED_AT_ONCE = tl.constexpr(8)  # numbers of 16 bits in 16 bytes, the widest store


@triton.jit
def decode_kernel(
    codes, code_stride, scales, scale_r, scale_c, amax, out, out_r, out_c, R, C,
    PLANE: tl.constexpr, GLOBAL: tl.constexpr, UNROTATE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Decode the tile of this program of an operand [R, C] to ``out``, which has strides ``out_r`` and ``out_c``.

    Args:
        GLOBAL: apply the scale of the whole tensor (or row), too. Without it, it is taken as 1.
        UNROTATE: undo the rotation.
        WIDE: offsets inside of a tile need 64 bits.
    """
    across = tl.cdiv(C, BC)
    r0, c0 = tl.program_id(0) // across * BR, tl.program_id(0) % across * BC
    v = decoded_tile(
        codes, code_stride, scales, scale_r, scale_c, amax, r0, c0, R, C, PLANE, GLOBAL, UNROTATE, BR, BC, WIDE
    )  # fmt: skip
    r, c = tl.arange(0, BR), tl.arange(0, BC)
    near_r, near_c = r, c
    if WIDE:
        near_r, near_c = r.to(tl.int64), c.to(tl.int64)
    start = r0.to(tl.int64) * out_r + c0.to(tl.int64) * out_c
    to = out + start + (near_r[:, None] * out_r + near_c[None, :] * out_c)
    tl.store(
        to,
        as_dtype(v, out.dtype.element_ty, PLANE.hardware.compiled),
        mask=(r0 + r < R)[:, None] & (c0 + c < C)[None, :],
    )


@triton.jit
def decoded_tile(
    codes, code_stride, scales, scale_r, scale_c, amax, r0, c0, R, C,
    PLANE: tl.constexpr, GLOBAL: tl.constexpr, UNROTATE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The tile [BR, BC] of an operand [R, C] that begins at (r0, c0), in fp32. See `decode_kernel`."""
    v = loaded_values(codes, code_stride, r0, c0, R, C, PLANE, BR, BC, WIDE)
    if PLANE.block_rows == 0:
        if GLOBAL:
            v = v * tl.load(scales)
    else:
        rows: tl.constexpr = 1 if PLANE.replicated else PLANE.block_rows
        length: tl.constexpr = part_of_block(PLANE)
        factor = loaded_factors(scales, scale_r, scale_c, amax, r0, c0, R, C, PLANE, GLOBAL, BR // rows, BC // length)
        if uses_fp4_instruction(PLANE):
            if PLANE.rule == "two_level" and not GLOBAL:
                factor = factor * 64.0  # block scales are far from the largest fp32 number
            else:
                v = v * 64.0  # the factor may be so large that 64 times it is infinite
        parts = tl.reshape(v, (BR // rows, rows, BC // length, length))
        v = tl.reshape(parts * factor[:, None, :, None], (BR, BC))
    if UNROTATE:
        v = rows_of_sixteen(unrotated(sixteen_of_rows(v), PLANE.rotation))
    return v


@triton.jit
def as_dtype(v, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """fp32 numbers rounded to another dtype. In software, bf16 is the upper half of what was rounded on bits."""
    if tl.bfloat16 == DTYPE and not COMPILED:
        return (bits_of(rounded_to_bf16(v, False)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(DTYPE)


@triton.constexpr_function
def uses_fp4_instruction(plane):
    """Whether codes are read by `hardware_fp4_values`, which gives a 64th of the numbers."""
    return plane.hardware.fp8 and plane.element.is_e2m1


@triton.constexpr_function
def part_of_block(plane):
    """How many numbers take their factor together: a block, or the part of it that a thread has.

    A thread that stores 16 bytes has 8 numbers of a block of 16. With a factor for each 8, threads need not exchange
    factors; that two of them read the same scale costs less.
    """
    return STORED_AT_ONCE if uses_fp4_instruction(plane) and plane.block_length == 16 else plane.block_length


@triton.jit
def loaded_values(
    codes, stride, r0, c0, R, C, PLANE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr
):
    """The numbers [BR, BC] of the codes of a tile, without scales; a 64th of them if `uses_fp4_instruction`."""
    ELEMENT: tl.constexpr = PLANE.element
    if ELEMENT.bits == 8:
        if PLANE.operand_major:
            each = loaded_bytes(codes, stride, 1, r0, c0, R, C, BR, BC, WIDE)
        else:
            each = loaded_bytes(codes, 1, stride, r0, c0, R, C, BR, BC, WIDE)
        if PLANE.hardware.fp8 and ELEMENT.is_e4m3:
            return hardware_fp8_values(each, FROM_E4M3)
        elif PLANE.hardware.fp8 and ELEMENT.is_e5m2:
            return hardware_fp8_values(each, FROM_E5M2)
        else:
            return element_values(each.to(tl.int32), ELEMENT)
    elif ELEMENT.bits == 4:
        # A thread loads the codes of what it stores at once, so that threads need not exchange numbers.
        both = loaded_bytes(codes, stride, 1, r0, c0 // 2, R, C // 2, BR, BC // 2, WIDE, STORED_AT_ONCE // 2)
        if uses_fp4_instruction(PLANE):
            even, odd = hardware_fp4_values(both)
            return joined(even, odd)
        else:
            both = both.to(tl.int32)
            return joined(element_values(both & 15, ELEMENT), element_values(both >> 4, ELEMENT))
    else:
        first = loaded_bytes(codes, stride, 3, r0, c0 // 4, R, C // 4, BR, BC // 4, WIDE).to(tl.int32)
        second = loaded_bytes(codes + 1, stride, 3, r0, c0 // 4, R, C // 4, BR, BC // 4, WIDE).to(tl.int32)
        third = loaded_bytes(codes + 2, stride, 3, r0, c0 // 4, R, C // 4, BR, BC // 4, WIDE).to(tl.int32)
        word = first | (second << 8) | (third << 16)
        even = joined(word & 63, (word >> 12) & 63)
        odd = joined((word >> 6) & 63, (word >> 18) & 63)
        return element_values(joined(even, odd), ELEMENT)


@triton.jit
def loaded_bytes(
    codes, stride_r, stride_c, r0, c0, R, C, BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr = 0,
):  # fmt: skip
    """The bytes of a tile [BR, BC] of a matrix [R, C]. A thread loads ``AT_ONCE`` bytes of a row with one instruction.

    Triton chooses the number if it is 0.
    """
    r, c = tl.arange(0, BR), tl.arange(0, BC)
    near_r, near_c = r, c
    if WIDE:
        near_r, near_c = r.to(tl.int64), c.to(tl.int64)
    start = r0.to(tl.int64) * stride_r + c0.to(tl.int64) * stride_c
    at = codes + start + (near_r[:, None] * stride_r + near_c[None, :] * stride_c)
    if AT_ONCE:
        at = tl.max_contiguous(at, (1, AT_ONCE))
    return tl.load(at, mask=(r0 + r < R)[:, None] & (c0 + c < C)[None, :], other=0)


@triton.jit
def loaded_factors(
    scales, scale_r, scale_c, amax, r0, c0, R, C, PLANE: tl.constexpr, GLOBAL: tl.constexpr,
    HIGH: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """The numbers [HIGH, LONG] by which the codes of blocks, or of parts of blocks, are multiplied."""
    rows: tl.constexpr = 1 if PLANE.replicated else PLANE.block_rows
    line = r0 // rows + tl.arange(0, HIGH)
    parts: tl.constexpr = PLANE.block_length // part_of_block(PLANE)
    block = c0 // PLANE.block_length + tl.arange(0, LONG) // parts
    inside = (line * rows < R)[:, None] & (block * PLANE.block_length < C)[None, :]
    at = scales + line.to(tl.int64)[:, None] * scale_r + block.to(tl.int64)[None, :] * scale_c
    stored = tl.load(at, mask=inside, other=0)
    if PLANE.rule == "two_level":
        if not GLOBAL:
            return block_scale_values(stored, PLANE)
        elif PLANE.row_amax:
            return decode_factor(stored, tl.load(amax + line, mask=line < R, other=0.0)[:, None], PLANE)
        else:
            return decode_factor(stored, tl.load(amax), PLANE)
    else:
        return decode_factor(stored, 1.0, PLANE)
