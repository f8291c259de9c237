"""Philox4x32-10, and which of its words rounds which numbers.

Philox turns a counter of 128 bits and a key of 64 bits into 128 random bits (J. Salmon and others, "Parallel random
numbers: as easy as 1, 2, 3", 2011). GPUs give each thread a sequence, which is the upper half of the counter, and count
the calls of a thread in the lower half. The seed is the key.

Here words are counted as Transformer Engine counts them in its kernel for bf16 tensors, when it makes both planes of an
NVFP4 tensor with blocks of 16. Threads are those of that kernel: 128 for a chunk of 128x128 numbers, which they go
through in four stages of 64x64. In a stage, each thread rounds two rowwise blocks and then two columnwise blocks, which
takes 8 + 8 words, one for every four numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...planes import ROWWISE, Direction

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_CHUNK, _STAGE, _BLOCK, _THREADS, _WARP = 128, 64, 16, 128, 32
_WORDS_OF_STAGE, _ROWWISE_WORDS = 16, 8


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four random words for each counter of four words. All words are 32 bits in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product may be negative as int64. Its bits are right, and only they are used.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(second) ^ c1 ^ k0, second & _MASK, _high(first) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def philox_words(seed: int, direction: Direction, line: Tensor, word: Tensor, width: int) -> Tensor:
    """A random word for every four numbers in a row of an operand: rows ``line``, and fours ``word`` along them.

    ``width`` is the number of columns of the matrix.
    """
    row, column = (line, 4 * word) if direction is ROWWISE else (4 * word, line)
    y, x = row % _STAGE, column % _STAGE
    stage = row % _CHUNK // _STAGE * 2 + column % _CHUNK // _STAGE
    if direction is ROWWISE:
        # A thread has a block of row y % 32, and then that of the row 32 further down. The threads of the second half
        # of a warp begin with the second half of a block, because of the banks of shared memory.
        thread = y % 32 * 4 + x // _BLOCK
        half = (x % _BLOCK // 8 + thread % _WARP // 16) % 2
        drawn = y // 32 * 4 + half * 2 + x % 8 // 4
    else:
        # A thread has the blocks of two neighbouring columns. Neighbouring threads are 16 rows apart.
        lane = x // 2
        thread = (y // _BLOCK - lane) % 4 * _WARP + lane
        drawn = _ROWWISE_WORDS + x % 2 * 4 + y % _BLOCK // 4
    draw = stage * _WORDS_OF_STAGE + drawn
    chunk = row // _CHUNK * -(-width // _CHUNK) + column // _CHUNK
    sequence = chunk * _THREADS + thread
    zero = torch.zeros_like(sequence)
    words = philox4x32((draw // 4, zero, sequence & _MASK, sequence >> 32), (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(words).gather(0, (draw % 4).unsqueeze(0)).squeeze(0)


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _MASK
