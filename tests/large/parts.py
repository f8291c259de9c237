"""Large matrices, and parts of them to compare.

Parts lie where counts of numbers or bytes cross powers of two, and at both ends. A part is quantized by the reference,
under the amax of the whole and with the random numbers of its place.
"""

from dataclasses import replace

import torch

from crossgrain import ROWWISE, kernels
from crossgrain.kernels import REFERENCE, Target
from crossgrain.kernels.reference.random_bits import hash_counter, stream_keys
from crossgrain.planes import bytes_per_row, empty_plane

from ..common.encodings import SEED

CPU = torch.device("cpu")
PART = 128  # rows or columns of a part: a multiple of all blocks
WIDTH = 4096
HEIGHT = (1 << 31) // WIDTH + PART  # the last part lies beyond 2**31 numbers
COUNT = HEIGHT * WIDTH
PERIOD = 4099  # a prime: rows that are a power of two apart are different


def filled(dtype: torch.dtype) -> torch.Tensor:
    """The numbers [HEIGHT, WIDTH]: a matrix of PERIOD rows again and again; the largest number is the last."""
    part = torch.randn(PERIOD, WIDTH, generator=torch.Generator().manual_seed(3)).clamp(-4, 4).to(dtype)
    numbers = torch.empty(HEIGHT, WIDTH, dtype=dtype)
    for start in range(0, HEIGHT, PERIOD):
        rows = numbers[start : start + PERIOD]
        rows.copy_(part[: len(rows)])
    numbers[-1, -1] = 5.0
    return numbers


def gigabytes_of(*planes):
    """Of codes and scales, rounded up."""
    bits = [encoding.format.element.bits + (1 if encoding.format.block else 0) for _, encoding in planes]
    return round(sum(bits) * COUNT / 8e9 + 0.2, 1)


def parts(shape):
    """Rows or columns, whichever there are more of: both ends, and near the places where bytes cross 2**31."""
    axis = 0 if shape[0] > shape[1] else 1
    size = shape[axis]
    starts = {place // PART * PART for place in (0, size // 4, size // 2, size - PART)}
    return [(axis, start) for start in sorted(starts)]


def random_bytes_at(row, column, shape):
    """The random numbers of the reference for a part of a matrix that begins at this row and column."""

    def random_bytes(seed, direction, operand_shape, device, source, within):
        rows, length = operand_shape
        lines, words = torch.arange(rows).unsqueeze(1), torch.arange(-(-length // 4))
        if direction is ROWWISE:
            counter = (row + lines) * -(-shape[1] // 4) + column // 4 + words
        else:
            counter = (row // 4 + words) * shape[1] + column + lines
        hashed = hash_counter(counter, *stream_keys(seed, direction)).unsqueeze(-1)
        return (hashed >> torch.tensor([0, 8, 16, 24]) & 0xFF).view(rows, -1)[:, :length].to(torch.uint8)

    return random_bytes


def written(x, encodings):
    planes = [Target(empty_plane(encoding.format, way, x.shape, device=CPU), encoding) for way, encoding in encodings]
    targets = kernels.measure(x, planes)
    kernels.encode(x, targets, SEED)
    return targets


def assert_part_is_right(x, target, axis, start, monkeypatch):
    """Compare codes and scales of a part of a plane with those that the reference makes of that part of ``x``."""
    place = (start, 0) if axis == 0 else (0, start)
    monkeypatch.setattr("crossgrain.kernels.reference.encode.random_bytes", random_bytes_at(*place, tuple(x.shape)))
    plane, fmt = target.plane, target.plane.format
    small = x.narrow(axis, start, PART).contiguous()
    # Blocks of the operand: rows of a rowwise plane are rows of the matrix, those of a columnwise plane its columns.
    along_rows = (axis == 0) == (plane.direction is ROWWISE)
    amax = target.amax
    if fmt.global_amax == "row" and along_rows:
        amax = amax[start : start + PART]
    expected = empty_plane(fmt, plane.direction, small.shape, device=CPU, transposed=plane.transposed)
    REFERENCE.encode(small, [replace(target, plane=expected, amax=amax)], SEED)
    codes, scales = plane.operand_codes(), plane.operand_scales()
    if along_rows:
        codes = codes[start : start + PART]
        if fmt.block is not None:
            rows = 1 if fmt.layout.replicated else fmt.block_rows
            scales = scales[start // rows : (start + PART) // rows]
    else:
        codes = codes[:, bytes_per_row(fmt, start) : bytes_per_row(fmt, start + PART)]
        if fmt.block is not None:
            scales = scales[:, start // fmt.block_length : (start + PART) // fmt.block_length]
    where = f"{plane.direction.value} {fmt.name}, {'rows' if axis == 0 else 'columns'} from {start}"
    assert torch.equal(codes, expected.operand_codes()), f"codes, {where}"
    assert torch.equal(scales, expected.operand_scales()), f"scales, {where}"
