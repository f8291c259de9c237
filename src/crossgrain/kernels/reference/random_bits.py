"""Random bytes for stochastic rounding, as a function of seed, direction and position in the whole tensor.

There is no sequence of draws, so that the result does not depend on tiles, threads and backends. Four numbers in a row
along the blocks use one 32-bit word, one byte each, the lowest first: a hash, or a word of Philox (`philox`). Each
direction has its own stream.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ...formats.encoding import RandomSource
from ...planes import ROWWISE, Direction
from ..target import Within
from .philox import philox_words

_Bits = TypeVar("_Bits", int, Tensor)

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: makes the keys of the two directions different


def random_bytes(
    seed: int,
    direction: Direction,
    operand_shape: tuple[int, int],
    device: torch.device,
    source: RandomSource = "hash",
    within: Within | None = None,
) -> Tensor:
    """Random bytes [R, C] for an operand, which may be that of a part ``within`` a larger matrix.

    A word depends on the position of its numbers in the whole matrix, so a part has the random bytes of the whole.
    """
    rows, length = operand_shape
    rowwise = direction is ROWWISE
    top, left, width = within or (0, 0, length if rowwise else rows)
    first_line, first = (top, left) if rowwise else (left, top)
    first_word, end_word = first // 4, -(-(first + length) // 4)
    line = torch.arange(first_line, first_line + rows, device=device, dtype=torch.int64).unsqueeze(1)
    word = torch.arange(first_word, end_word, device=device, dtype=torch.int64)
    words = (philox_words if source == "philox" else _hashed_words)(seed, direction, line, word, width)
    shifts = 8 * torch.arange(4, device=device)
    bytes_ = (words.unsqueeze(-1) >> shifts) & 0xFF
    return bytes_.flatten(1).narrow(1, first - 4 * first_word, length).to(torch.uint8)


def _hashed_words(seed: int, direction: Direction, line: Tensor, word: Tensor, width: int) -> Tensor:
    """A hash for every four numbers in a row of an operand: rows ``line``, and fours ``word`` along them.

    The counter is their position in the matrix, row by row: ``m * ceil(K / 4) + k // 4`` for rowwise planes,
    ``(m // 4) * K + k`` for columnwise planes, where K is ``width``.
    """
    counter = line * -(-width // 4) + word if direction is ROWWISE else word * width + line
    return hash_counter(counter, *stream_keys(seed, direction))


def stream_keys(seed: int, direction: Direction) -> tuple[int, int]:
    """Two 32-bit keys for a 64-bit seed and a direction."""
    plane = 0 if direction is ROWWISE else _GOLDEN
    low, high = seed & _MASK, (seed >> 32) & _MASK
    first = _mix(low ^ plane)
    return first, _mix((high + first + _GOLDEN) & _MASK)


def hash_counter(counter: Tensor, key0: int, key1: int) -> Tensor:
    """32 random bits (in int64) for each 64-bit counter."""
    hashed = _mix((counter & _MASK) ^ key0)
    return _mix(hashed ^ ((counter >> 32) & _MASK) ^ key1)


def _mix(h: _Bits) -> _Bits:
    """A 32-bit hash finalizer with low bias (lowbias32, with shifts 16, 15, 16), for Python ints or int64 tensors."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK
    return h ^ (h >> 16)
