"""Numbers and codes on the bits of fp32, for Triton kernels: every target rounds alike, and so does the interpreter.

Rules of this package, none of which the interpreter would enforce:

- never ``/`` on fp32, which is a division of 2 ulp on GPUs: `tl.div_rn`;
- never rely on ``a * b + c``: kernels are launched with ``enable_fp_fusion=False``;
- maxima skip NaNs, which is the default of `tl.max`; `larger` does so in the interpreter, too; `without_nan` cleans
  what is left of a block of NaNs;
- no tensors of 8-bit floating point numbers: conversions to them differ between targets and versions of Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
QUIET_NAN = tl.constexpr(0x7FC00000)
FP32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def without_nan(amax):
    """A maximum of magnitudes with 0 for NaN, which it is only if all numbers were NaN."""
    return tl.where(amax != amax, 0.0, amax)


@triton.jit
def larger(a, b, COMPILED: tl.constexpr):
    """The larger of two magnitudes. NaN gives way to a number, which it does not in `tl.maximum` of the interpreter."""
    if COMPILED:
        return tl.maximum(a, b)
    else:
        return tl.where(a != a, b, tl.where(b != b, a, tl.maximum(a, b)))


@triton.jit
def at_most_fp32(x):
    """``x`` with the largest fp32 number in place of infinity. NaN stays."""
    return tl.where(x > FP32_MAX, FP32_MAX, x)


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def rounded_to_bf16(v, COMPILED: tl.constexpr):
    """fp32 numbers rounded to bf16, as fp32. The cast of the interpreter truncates."""
    if COMPILED:
        return v.to(tl.bfloat16).to(tl.float32)
    else:
        b = bits_of(v)
        rounded = (b + (0x7FFF + ((b >> 16) & 1))) & -65536
        return float_of(tl.where((b & MAGNITUDE) > INFINITY, b, rounded))


# ---- casts to elements -------------------------------------------------------------------------------


@triton.jit
def nearest_codes(v, ELEMENT: tl.constexpr):
    """Codes (int32) of fp32 numbers, rounded to the nearest, ties to even, saturated.

    A magnitude is rounded by adding the power of two whose last bit is the distance between neighbours: the low bits
    of the sum count these distances.
    """
    b = bits_of(v)
    a = b & MAGNITUDE
    saturated = tl.minimum(a, ELEMENT.max_bits)
    exponent = tl.maximum(saturated & INFINITY, ELEMENT.min_exponent_field << 23)
    power = exponent + ((23 - ELEMENT.mantissa_bits) << 23)
    steps = bits_of(float_of(saturated) + float_of(power)) - power
    binades = (exponent >> (23 - ELEMENT.mantissa_bits)) - (ELEMENT.min_exponent_field << ELEMENT.mantissa_bits)
    return signed_codes(steps + binades, b, a, ELEMENT)


@triton.jit
def stochastic_codes(v, fraction, ELEMENT: tl.constexpr):
    """Codes (int32) of fp32 numbers, rounded stochastically, saturated.

    ``fraction`` (int32) has 8 random bits in the bits 15 to 22, where fp32 has its mantissa. With the exponent of the
    distance between neighbours they are that distance, plus r/256 of it. The distance is taken off again, which is
    exact.
    """
    b = bits_of(v)
    a = b & MAGNITUDE
    saturated = tl.minimum(a, ELEMENT.max_bits)
    exponent = tl.maximum(saturated & INFINITY, ELEMENT.min_exponent_field << 23)
    step = exponent - (ELEMENT.mantissa_bits << 23)
    part = float_of(step | fraction) - float_of(step)
    moved = tl.minimum(float_of(saturated) + part, ELEMENT.max)
    t = bits_of(moved)
    # Rounded down on the grid at the sum: cut off the bits of fp32's mantissa, or count steps of subnormal numbers.
    normal = (t >> (23 - ELEMENT.mantissa_bits)) - ((ELEMENT.min_exponent_field - 1) << ELEMENT.mantissa_bits)
    if ELEMENT.mantissa_bits == 1:  # there is one subnormal number, and below it ``normal`` is at most 0
        magnitude = tl.maximum(normal, (t >= ((ELEMENT.min_exponent_field - 1) << 23)).to(tl.int32))
    else:
        small = (moved * ELEMENT.steps_per_one).to(tl.int32)
        magnitude = tl.where(t < (ELEMENT.min_exponent_field << 23), small, normal)
    return signed_codes(magnitude, b, a, ELEMENT)


@triton.jit
def signed_codes(magnitude, b, a, ELEMENT: tl.constexpr):
    """Codes of magnitudes with the signs of the numbers ``b`` (bits), and the code of NaN."""
    if ELEMENT.twos_complement:
        codes = tl.where(b < 0, -magnitude, magnitude) & 0xFF
    elif ELEMENT.signed:
        codes = magnitude | ((b >> (32 - ELEMENT.bits)) & (1 << (ELEMENT.bits - 1)))
    else:
        codes = magnitude
    return tl.where(a > INFINITY, ELEMENT.nan_code, codes)


_TO_FP8 = """
{
.reg .b16 low, high;
cvt.rn.satfinite.ELEMENTx2.f32 low, $2, $1;
cvt.rn.satfinite.ELEMENTx2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}
"""
TO_E4M3 = tl.constexpr(_TO_FP8.replace("ELEMENT", "e4m3"))
TO_E5M2 = tl.constexpr(_TO_FP8.replace("ELEMENT", "e5m2"))


@triton.jit
def hardware_fp8_codes(v, INSTRUCTION: tl.constexpr):
    """Codes (uint8) of E4M3 or E5M2 by the instruction of sm_89 and later: `TO_E4M3` or `TO_E5M2`.

    It is written out because the cast of Triton 3.6 to 3.8 goes through fp16 on sm_89, which rounds twice.
    """
    return tl.inline_asm_elementwise(INSTRUCTION, "=r,f,f,f,f", [v], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def hardware_fp4_codes(a, b, c, d, e, f, g, h):
    """The codes of eight numbers in an int32, the first in the lowest bits, by the instruction of sm_100 and sm_120."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b8 b0, b1, b2, b3;
        cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1;
        cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3;
        cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5;
        cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7;
        mov.b32 $0, {b0, b1, b2, b3};
        }
        """,
        "=r,f,f,f,f,f,f,f,f",
        [a, b, c, d, e, f, g, h],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def fp8_or_software_codes(v, ELEMENT: tl.constexpr, FP8: tl.constexpr):
    """Codes (uint8) of fp32 numbers, rounded to the nearest: by hardware if ``FP8`` says that there is some."""
    if FP8 and ELEMENT.is_e4m3:
        return hardware_fp8_codes(v, TO_E4M3)
    elif FP8 and ELEMENT.is_e5m2:
        return hardware_fp8_codes(v, TO_E5M2)
    else:
        return nearest_codes(v, ELEMENT).to(tl.uint8)


# ---- values of elements ------------------------------------------------------------------------------


@triton.jit
def element_values(codes, ELEMENT: tl.constexpr):
    """fp32 numbers of codes (int32).

    The bits of a magnitude, moved to where fp32 has its exponent and mantissa, are the number times a power of two.
    This is also true of subnormal numbers.
    """
    if ELEMENT.twos_complement:
        return ((codes << 24) >> 24).to(tl.float32) * ELEMENT.unit
    else:
        magnitude = codes & ELEMENT.magnitude_mask
        value = float_of(magnitude << (23 - ELEMENT.mantissa_bits)) * ELEMENT.unit
        if ELEMENT.has_nan:
            value = tl.where(magnitude > ELEMENT.last_code, float_of(tl.full(codes.shape, QUIET_NAN, tl.int32)), value)
        if ELEMENT.has_infinity:
            value = tl.where(magnitude == ELEMENT.last_code, float_of(tl.full(codes.shape, INFINITY, tl.int32)), value)
        if ELEMENT.signed:
            value = float_of(bits_of(value) | ((codes & (1 << (ELEMENT.bits - 1))) << (32 - ELEMENT.bits)))
        return value


_FROM_FP8 = """
{
.reg .b16 low, high, a, b, c, d;
.reg .b32 first, second;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.ELEMENTx2 first, low;
cvt.rn.f16x2.ELEMENTx2 second, high;
mov.b32 {a, b}, first;
mov.b32 {c, d}, second;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b;
cvt.f32.f16 $2, c;
cvt.f32.f16 $3, d;
}
"""
FROM_E4M3 = tl.constexpr(_FROM_FP8.replace("ELEMENT", "e4m3"))
FROM_E5M2 = tl.constexpr(_FROM_FP8.replace("ELEMENT", "e5m2"))


@triton.jit
def hardware_fp8_values(codes, INSTRUCTION: tl.constexpr):
    """fp32 numbers of codes (uint8) by the instruction of sm_89 and later: `FROM_E4M3` or `FROM_E5M2`.

    It goes through fp16, which holds all of them.
    """
    return tl.inline_asm_elementwise(INSTRUCTION, "=f,=f,=f,=f,r", [codes], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def hardware_fp4_values(both):
    """The numbers of two E2M1 codes in each byte, divided by 64: fp32 of the lower and of the upper code.

    An E2M1 code, with its magnitude moved up by two bits, is the E4M3 code of the number divided by 64. So the
    instruction of sm_89 serves.
    """
    even, odd = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 even, odd, t;
        and.b32 t, $2, 0x07070707;
        shl.b32 even, t, 2;
        and.b32 t, $2, 0x08080808;
        shl.b32 t, t, 4;
        or.b32 $0, even, t;
        and.b32 t, $2, 0x70707070;
        shr.u32 odd, t, 2;
        and.b32 t, $2, 0x80808080;
        or.b32 $1, odd, t;
        }
        """,
        "=r,=r,r",
        [both],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )
    return hardware_fp8_values(even, FROM_E4M3), hardware_fp8_values(odd, FROM_E4M3)


@triton.jit
def e8m0_value(e):
    """fp32 2**(e - 127) of E8M0 bytes (int32); 255 is NaN."""
    normal = tl.where(e == 0, 0x400000, e << 23)
    return float_of(tl.where(e == 255, QUIET_NAN, normal))


@triton.jit
def e8m0_reciprocal(e):
    """fp32 2**(127 - e) of E8M0 bytes (int32), which are not 255."""
    return float_of(tl.where(e == 254, 0x400000, (254 - e) << 23))


# ---- random numbers ----------------------------------------------------------------------------------


@triton.jit
def mixed(h):
    """A 32-bit finalizer, on uint32: that of `reference.random_bits`."""
    h = h ^ (h >> 16)
    h = h * tl.full((), 0x7FEB352D, tl.uint32)
    h = h ^ (h >> 15)
    h = h * tl.full((), 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def stream_keys(seed, ROWWISE: tl.constexpr):
    """Two keys (uint32) for a seed (int64) and a direction."""
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    if ROWWISE:
        first = mixed(low)
    else:
        first = mixed(low ^ golden)
    return first, mixed(high + first + golden)


@triton.jit
def hashed(counter, key0, key1):
    """32 random bits (uint32) for each counter: int64, or int32 for counters below 2**32."""
    low = mixed(counter.to(tl.uint32) ^ key0)
    if counter.dtype == tl.int64:
        low = low ^ (counter >> 32).to(tl.uint32)
    return mixed(low ^ key1)


@triton.jit
def random_fraction(word, BYTE: tl.constexpr):
    """Byte ``BYTE`` of random words in the bits 15 to 22 (int32), for `stochastic_codes`."""
    if BYTE == 0:
        moved = word << 15
    elif BYTE == 1:
        moved = word << 7
    elif BYTE == 2:
        moved = word >> 1
    else:
        moved = word >> 9
    return moved.to(tl.int32, bitcast=True) & 0x7F8000
