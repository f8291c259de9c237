"""Triton kernels on which the emulator is tested: reductions, casts, transposition, loops, scans, atomics."""

import triton
import triton.language as tl


@triton.jit
def e4m3_codes(value, HARDWARE: tl.constexpr):
    """Finite fp32 to E4M3, to nearest even, saturated: by the instruction, or on bits for GPUs without it."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [value],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    bits = value.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Beside 2**14, neighbours in fp32 are as far apart as subnormal E4M3 numbers.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def tile_kernel(
    x, row_codes, col_codes, row_sizes, largest, M, N, BM: tl.constexpr, BN: tl.constexpr, HARDWARE: tl.constexpr
):
    """Codes of a tile by the largest number of each row, and of its transpose by that of each column."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    value = tl.load(x + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    rows, cols = tl.max(tl.abs(value), axis=1), tl.max(tl.abs(value), axis=0)
    codes = e4m3_codes(tl.div_rn(value, tl.broadcast_to(rows[:, None], (BM, BN))) * 448.0, HARDWARE)
    tl.store(row_codes + m[:, None] * N + n[None, :], codes, mask=inside)
    codes = e4m3_codes(tl.div_rn(value, tl.broadcast_to(cols[None, :], (BM, BN))) * 448.0, HARDWARE)
    tl.store(col_codes + n[:, None] * M + m[None, :], tl.trans(codes), mask=tl.trans(inside))
    tl.store(row_sizes + tl.program_id(1) * M + m, rows, mask=m < M)
    tl.atomic_max(largest, tl.max(rows, axis=0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def ragged_kernel(x, lengths, sums, width, B: tl.constexpr):
    """Sums of rows with lengths of their own: blocks loop unequally, and those of empty rows return early."""
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    if length == 0:
        return
    total = tl.zeros((B,), tl.int32)
    for start in range(0, length, B):
        at = start + tl.arange(0, B)
        total += tl.load(x + row * width + at, mask=at < length, other=0)
    tl.store(sums + row, tl.sum(total, axis=0))


@triton.jit
def scan_kernel(x, running, ordered, N: tl.constexpr):
    """Running sums of a row, and the row in order."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(running + at, tl.cumsum(value, axis=0))
    tl.store(ordered + at, tl.sort(value, dim=0))


@triton.jit
def transpose_kernel(x, y, R: tl.constexpr, C: tl.constexpr):
    """A matrix of 16-bit numbers, transposed through shared memory."""
    r, c = tl.arange(0, R), tl.arange(0, C)
    tl.store(y + c[:, None] * R + r[None, :], tl.trans(tl.load(x + r[:, None] * C + c[None, :])))
