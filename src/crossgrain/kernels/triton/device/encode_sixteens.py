"""Write one plane of a two-level format (NVFP4) from 16 tensors: number i of all blocks of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import (
    element_values,
    hardware_fp4_codes,
    hashed,
    nearest_codes,
    random_fraction,
    reciprocal,
    stochastic_codes,
    stream_keys,
)
from .encode_blocks import word_counters
from .scales import global_encode_scale, stored_block_scale
from .sixteens import largest, rotated, whole_tile


@triton.jit
def write_sixteens(
    v, r0, b0, R, B, codes, code_stride, scales, scale_r, scale_c, amax, amax_out, seed, top, left, width,
    KIND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of blocks.

    Args:
        v: 16 tensors [BR, BB] of fp32 numbers of an operand with R rows of B blocks; the tile begins at (r0, b0).
        codes: the codes, in rows of ``code_stride`` bytes.
        scales: the scales, with strides ``scale_r`` and ``scale_c``.
        amax: the amax of the tensor, or of each row.
        amax_out: where to keep it.
        seed: pointer to the seed of stochastic rounding.
        top, left, width: see `encode_blocks.write_blocks`.
        EVEN: B is even.
    """
    PLANE: tl.constexpr = KIND.plane
    BR: tl.constexpr = v[0].shape[0]
    BB: tl.constexpr = v[0].shape[1]
    r = tl.arange(0, BR)
    b = tl.arange(0, BB)
    if PLANE.rotation >= 0:
        v = rotated(v, PLANE.rotation, PLANE.hardware.compiled)
    if PLANE.row_amax:
        one = tl.load(amax + r0 + r, mask=r0 + r < R, other=1.0)
        tl.store(amax_out + r0 + r, one, mask=(r0 + r < R) & (b0 == 0))
        one = one[:, None]
    else:
        one = tl.load(amax)
        if (r0 == 0) & (b0 == 0):
            tl.store(amax_out, one)
        one = tl.broadcast_to(one, (1, 1))
    encode = global_encode_scale(one, PLANE)
    decode = reciprocal(encode)
    block_max = largest(v, PLANE.hardware.compiled)
    if PLANE.block_rows == 16:
        block_max = whole_tile(block_max, True)
    if KIND.four_over_six != "":
        low, high, stored = four_over_six(v, block_max, one, encode, decode, KIND)
    else:
        wanted = block_max * (encode * PLANE.max_reciprocal)
        wanted = tl.where(wanted > 3.4028234663852886e38, 3.4028234663852886e38, wanted)
        stored, _, factor = stored_block_scale(wanted, decode, PLANE)
        low, high = packed(v, factor, r0, b0, seed, top, left, width, KIND)
    words = tl.reshape(tl.join(low, high), (BR, 2 * BB))
    w = tl.arange(0, 2 * BB)
    end = 2 * B
    if EVEN:
        end = tl.multiple_of(end, 4)
    inside = (r0 + r < R)[:, None] & (2 * b0 + w < end)[None, :]
    start = codes.to(tl.pointer_type(tl.int32)) + 2 * b0
    to = start + (r0 + r).to(tl.int64)[:, None] * (code_stride // 4) + w[None, :]
    tl.store(to, words, mask=inside)
    at = (r0 + r).to(tl.int64)[:, None] * scale_r + (b0 + b).to(tl.int64)[None, :] * scale_c
    tl.store(scales + at, stored, mask=(r0 + r < R)[:, None] & (b0 + b < B)[None, :])


@triton.jit
def packed(v, factor, r0, b0, seed, top, left, width, KIND: tl.constexpr):
    """The codes of all blocks in two int32 each, the first code in the lowest bits."""
    PLANE: tl.constexpr = KIND.plane
    if KIND.stochastic:
        key0, key1 = stream_keys(tl.load(seed), PLANE.rowwise)
        r = r0 + tl.arange(0, v[0].shape[0])[:, None]
        c = (b0 + tl.arange(0, v[0].shape[1])[None, :]) * 16
        low = tl.zeros(v[0].shape, tl.int32)
        high = tl.zeros(v[0].shape, tl.int32)
        for i in tl.static_range(16):
            if i % 4 == 0:
                words = hashed(word_counters(r, c + i, top, left, width, KIND), key0, key1)
            code = stochastic_codes(v[i] * factor, random_fraction(words, i % 4), PLANE.element)
            if i < 8:
                low = low | (code << (4 * i))
            else:
                high = high | (code << (4 * (i - 8)))
        return low, high
    else:
        return nearest_packed(v, factor, PLANE)


@triton.jit
def nearest_packed(v, factor, PLANE: tl.constexpr):
    """The codes of all blocks, rounded to the nearest, in two int32 each."""
    if PLANE.hardware.fp4 and PLANE.element.is_e2m1:
        low = hardware_fp4_codes(
            v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor,
            v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor,
        )  # fmt: skip
        high = hardware_fp4_codes(
            v[8] * factor, v[9] * factor, v[10] * factor, v[11] * factor,
            v[12] * factor, v[13] * factor, v[14] * factor, v[15] * factor,
        )  # fmt: skip
    else:
        low = nearest_codes(v[0] * factor, PLANE.element)
        high = nearest_codes(v[8] * factor, PLANE.element)
        for i in tl.static_range(1, 8):
            low = low | (nearest_codes(v[i] * factor, PLANE.element) << (4 * i))
            high = high | (nearest_codes(v[i + 8] * factor, PLANE.element) << (4 * i))
    return low, high


@triton.jit
def four_over_six(v, block_max, amax, encode, decode, KIND: tl.constexpr):
    """Codes and scales of the better of two scales for each block, see `reference.four_over_six`."""
    PLANE: tl.constexpr = KIND.plane
    wanted = tl.div_rn(block_max, tl.full(block_max.shape, PLANE.element.max, tl.float32)) * encode
    low6, high6, stored6, error6 = candidate(v, wanted, amax, decode, KIND)
    low4, high4, stored4, error4 = candidate(v, wanted * 1.5, amax, decode, KIND)
    four = error4 < error6
    return tl.where(four, low4, low6), tl.where(four, high4, high6), tl.where(four, stored4, stored6)


@triton.jit
def candidate(v, wanted, amax, decode, KIND: tl.constexpr):
    """Codes, stored scales and the error of each block."""
    PLANE: tl.constexpr = KIND.plane
    wanted = tl.where(wanted > PLANE.scale_element.max, PLANE.scale_element.max, wanted)
    stored, value, factor = stored_block_scale(wanted, decode, PLANE)
    low, high = nearest_packed(v, factor, PLANE)
    total = tl.zeros(v[0].shape, tl.float32)
    bound = tl.full(v[0].shape, PLANE.bound, tl.float32)
    for i in tl.static_range(16):
        if i < 8:
            code = (low >> (4 * i)) & 15
        else:
            code = (high >> (4 * (i - 8))) & 15
        decoded = element_values(code, PLANE.element) * value
        difference = tl.div_rn(decoded * amax, bound) - v[i]
        if KIND.four_over_six == "MAE":
            total = total + tl.abs(difference)
        else:
            total = total + difference * difference
    if PLANE.block_rows == 16:
        total = whole_tile(total, False)
    return low, high, stored, total
