"""Decoding and multiplying beyond 2**31 numbers: parts of the result are what parts of the planes give."""

import pytest
import torch

from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.formats import get_format
from crossgrain.kernels import REFERENCE
from crossgrain.kernels.cpu import products
from crossgrain.planes import bytes_per_row, empty_plane

from .parts import CPU, HEIGHT, PART, WIDTH, parts


@pytest.mark.parametrize("way", [ROWWISE, COLUMNWISE], ids=lambda way: way.value)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "fp8", "fp8_block", "fp8_block_2d"])
def test_decode(name, way, needs):
    """Random codes, decoded as a GEMM reads them (fp32) and as a matrix (bf16)."""
    fmt = get_format(name)
    needs(12.0)
    plane = empty_plane(fmt, way, (HEIGHT, WIDTH), device=CPU)
    pattern = torch.randint(0, 0x77, (1 << 20,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for start in range(0, plane.data.numel(), len(pattern)):
        piece = plane.data.view(-1)[start : start + len(pattern)]
        piece.copy_(pattern[: len(piece)].roll(start // len(pattern)))
    # Numbers that differ from block to block; no byte stands for NaN.
    least, kinds = (1, 7) if fmt.scale_rule == "fp32" else (100, 13)
    plane.scale.copy_(torch.arange(plane.scale.numel()).view(plane.scale.shape) % kinds + least)
    if plane.amax is not None:
        plane.amax.fill_(3.0)
    for dtype in (None, torch.bfloat16):
        decoded = kernels.decode_operand(plane) if dtype is None else kernels.decode(plane, dtype)
        matrix = decoded.t() if dtype is None and way is COLUMNWISE else decoded
        for _, start in parts((HEIGHT, WIDTH)):
            small = plane_of_rows(plane, start)
            operand = REFERENCE.decode_operand(small)
            same = operand.t() if way is COLUMNWISE else operand
            same = same if dtype is None else REFERENCE.decode(small, dtype)
            assert torch.equal(matrix[start : start + PART], same), f"{decoded.dtype}, rows from {start}"
        del decoded, matrix


def plane_of_rows(plane, start):
    """The plane of some rows of the matrix, with the codes and scales that they have in ``plane``."""
    fmt = plane.format
    small = empty_plane(fmt, plane.direction, (PART, WIDTH), device=CPU)
    if plane.direction is ROWWISE:
        small.operand_codes().copy_(plane.operand_codes()[start : start + PART])
    else:
        small.operand_codes().copy_(
            plane.operand_codes()[:, bytes_per_row(fmt, start) : bytes_per_row(fmt, start + PART)]
        )
    if fmt.block is None:
        small.scale.copy_(plane.scale)
    elif plane.direction is ROWWISE:
        rows = 1 if fmt.layout.replicated else fmt.block_rows
        small.operand_scales().copy_(plane.operand_scales()[start // rows : (start + PART) // rows])
    else:
        length = fmt.block_length
        small.operand_scales().copy_(plane.operand_scales()[:, start // length : (start + PART) // length])
    if plane.amax is not None:
        small.amax.copy_(plane.amax)
    return small


@pytest.mark.skipif(not products.has_byte_dot_products(), reason="this CPU has no dot products of bytes")
@pytest.mark.parametrize(
    "rows, columns, inner", [(HEIGHT, 16, WIDTH), (16, HEIGHT, WIDTH), ((1 << 16) + 8, 1 << 15, 16)]
)
def test_product(rows, columns, inner, needs):
    """From codes: a left operand, a right operand, and a result of more than 2**31 numbers."""
    needs(10.0)
    a, b = plane_of_codes(rows, inner), plane_of_codes(columns, inner)
    out = torch.full((rows, columns), torch.nan)
    kernels.multiply(a, b, out)
    for start in sorted({0, rows // 2 // 8 * 8, max(0, rows - 64)}):
        for left in sorted({0, columns // 2 // 16 * 16, max(0, columns - 64)}):
            part = torch.full((min(64, rows - start), min(64, columns - left)), torch.nan)
            kernels.multiply(rows_of(a, start), rows_of(b, left), part)
            assert torch.equal(out[start : start + 64, left : left + 64], part)


def plane_of_codes(rows, inner):
    plane = empty_plane(get_format("nvfp4"), ROWWISE, (rows, inner), device=CPU)
    pattern = torch.randint(0, 256, (PART * 3 - 1, inner // 2), generator=torch.Generator().manual_seed(rows))
    for start in range(0, rows, len(pattern)):
        piece = plane.data[start : start + len(pattern)]
        piece.copy_(pattern[: len(piece)])
    plane.scale.copy_(torch.arange(plane.scale.numel()).view(plane.scale.shape) % 5 + 52)
    plane.amax.fill_(1.0)
    return plane


def rows_of(plane, start):
    small = empty_plane(plane.format, ROWWISE, (min(64, plane.shape[0] - start), plane.shape[1]), device=CPU)
    small.data.copy_(plane.data[start : start + 64])
    small.operand_scales().copy_(plane.operand_scales()[start : start + 64])
    small.amax.copy_(plane.amax)
    return small
