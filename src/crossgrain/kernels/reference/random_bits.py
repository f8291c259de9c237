"""Random bytes for stochastic rounding, as a pure function of seed, plane and position.

Nothing is drawn in sequence, so tiling, threads and backends cannot change a bit. Four neighbours
along the blocks share one 32-bit hash, a byte each, lowest first; each plane has its own stream.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ...planes import ROWWISE, Direction

_Bits = TypeVar("_Bits", int, Tensor)

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: keeps the two planes' keys apart


def random_bytes(seed: int, direction: Direction, operand_shape: tuple[int, int], device: torch.device) -> Tensor:
    """[R, C] bytes in the operand's orientation.

    The counter of four neighbours is their place in the logical tensor, row by row: with rowwise
    planes ``m * ceil(K / 4) + k // 4``, with columnwise ones ``(m // 4) * K + k``.
    """
    rows, length = operand_shape
    words = -(-length // 4)
    row = torch.arange(rows, device=device, dtype=torch.int64).unsqueeze(1)
    word = torch.arange(words, device=device, dtype=torch.int64)
    counter = row * words + word if direction is ROWWISE else word * rows + row
    hashed = hash_counter(counter, *stream_keys(seed, direction))
    shifts = torch.tensor([0, 8, 16, 24], device=device)
    bytes_ = (hashed.unsqueeze(-1) >> shifts) & 0xFF
    return bytes_.view(rows, words * 4)[:, :length].to(torch.uint8)


def stream_keys(seed: int, direction: Direction) -> tuple[int, int]:
    """Two 32-bit keys for a 64-bit seed and a plane."""
    plane = 0 if direction is ROWWISE else _GOLDEN
    low, high = seed & _MASK, (seed >> 32) & _MASK
    first = _mix(low ^ plane)
    return first, _mix((high + first + _GOLDEN) & _MASK)


def hash_counter(counter: Tensor, key0: int, key1: int) -> Tensor:
    """32 random bits (in int64) for each 64-bit counter."""
    hashed = _mix((counter & _MASK) ^ key0)
    return _mix(hashed ^ ((counter >> 32) & _MASK) ^ key1)


def _mix(h: _Bits) -> _Bits:
    """A 32-bit finalizer with low bias (shifts 16, 15, 16), on Python ints or int64 tensors."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK
    return h ^ (h >> 16)
