"""`decode_kernel`: the numbers of a plane, in fp32, bf16 or fp16."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import bits_of, element_values, rounded_to_bf16
from .scales import decode_factor
from .sixteens import joined, rows_of_sixteen, sixteen_of_rows, unrotated


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
    r, c = tl.arange(0, BR), tl.arange(0, BC)
    v = element_values(loaded_codes(codes, code_stride, r0, c0, R, C, PLANE, BR, BC, WIDE), PLANE.element)
    if PLANE.block_rows == 0:
        if GLOBAL:
            v = v * tl.load(scales)
    else:
        rows: tl.constexpr = 1 if PLANE.replicated else PLANE.block_rows
        length: tl.constexpr = PLANE.block_length
        factor = loaded_factors(scales, scale_r, scale_c, amax, r0, c0, R, C, PLANE, GLOBAL, BR // rows, BC // length)
        parts = tl.reshape(v, (BR // rows, rows, BC // length, length))
        v = tl.reshape(parts * factor[:, None, :, None], (BR, BC))
    if UNROTATE:
        v = rows_of_sixteen(unrotated(sixteen_of_rows(v), PLANE.rotation))
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
def as_dtype(v, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """fp32 numbers rounded to another dtype. In software, bf16 is the upper half of what was rounded on bits."""
    if tl.bfloat16 == DTYPE and not COMPILED:
        return (bits_of(rounded_to_bf16(v, False)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return v.to(DTYPE)


@triton.jit
def loaded_codes(
    codes, stride, r0, c0, R, C, PLANE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr
):
    """The codes [BR, BC] of a tile as int32."""
    if PLANE.element.bits == 8:
        if PLANE.operand_major:
            return loaded_bytes(codes, stride, 1, r0, c0, R, C, BR, BC, WIDE)
        return loaded_bytes(codes, 1, stride, r0, c0, R, C, BR, BC, WIDE)
    if PLANE.element.bits == 4:
        both = loaded_bytes(codes, stride, 1, r0, c0 // 2, R, C // 2, BR, BC // 2, WIDE)
        return joined(both & 15, both >> 4)
    first = loaded_bytes(codes, stride, 3, r0, c0 // 4, R, C // 4, BR, BC // 4, WIDE)
    second = loaded_bytes(codes + 1, stride, 3, r0, c0 // 4, R, C // 4, BR, BC // 4, WIDE)
    third = loaded_bytes(codes + 2, stride, 3, r0, c0 // 4, R, C // 4, BR, BC // 4, WIDE)
    word = first | (second << 8) | (third << 16)
    even = joined(word & 63, (word >> 12) & 63)
    odd = joined((word >> 6) & 63, (word >> 18) & 63)
    return joined(even, odd)


@triton.jit
def loaded_bytes(codes, stride_r, stride_c, r0, c0, R, C, BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr):
    """The bytes of a tile [BR, BC] of a matrix [R, C] as int32."""
    r, c = tl.arange(0, BR), tl.arange(0, BC)
    near_r, near_c = r, c
    if WIDE:
        near_r, near_c = r.to(tl.int64), c.to(tl.int64)
    start = r0.to(tl.int64) * stride_r + c0.to(tl.int64) * stride_c
    at = codes + start + (near_r[:, None] * stride_r + near_c[None, :] * stride_c)
    return tl.load(at, mask=(r0 + r < R)[:, None] & (c0 + c < C)[None, :], other=0).to(tl.int32)


@triton.jit
def loaded_factors(
    scales, scale_r, scale_c, amax, r0, c0, R, C, PLANE: tl.constexpr, GLOBAL: tl.constexpr,
    HIGH: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """The numbers [HIGH, LONG] by which the codes of blocks are multiplied."""
    rows: tl.constexpr = 1 if PLANE.replicated else PLANE.block_rows
    line = r0 // rows + tl.arange(0, HIGH)
    block = c0 // PLANE.block_length + tl.arange(0, LONG)
    inside = (line * rows < R)[:, None] & (block * PLANE.block_length < C)[None, :]
    at = scales + line.to(tl.int64)[:, None] * scale_r + block.to(tl.int64)[None, :] * scale_c
    stored = tl.load(at, mask=inside, other=0)
    if PLANE.rule != "fp32":
        stored = stored.to(tl.int32)
    if PLANE.rule == "two_level":
        if not GLOBAL:
            return element_values(stored, PLANE.scale_element)
        if PLANE.row_amax:
            return decode_factor(stored, tl.load(amax + line, mask=line < R, other=0.0)[:, None], PLANE)
        return decode_factor(stored, tl.load(amax), PLANE)
    return decode_factor(stored, 1.0, PLANE)
