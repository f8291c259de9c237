"""The scale layout that tensor-core GEMMs read, as conversions from and to the compact one.

Scales [R, C] are cut into tiles of 128x4; inside a tile, row i and column j go to byte
``(i % 32) * 16 + (i // 32) * 4 + j``, so that 32 rows four apart sit together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..planes import round_up


def swizzle_scales(scales: Tensor) -> Tensor:
    """Compact scales [R, C] -> swizzled [R up to 128, C up to 4], padding zero.

    Columnwise scales that are stored untransposed (MXFP8) are to be transposed first.
    """
    rows, blocks = _matrix(scales)
    row_tiles, block_tiles = round_up(rows, 128) // 128, round_up(blocks, 4) // 4
    padded = torch.nn.functional.pad(scales, (0, block_tiles * 4 - blocks, 0, row_tiles * 128 - rows))
    tiles = padded.reshape(row_tiles, 4, 32, block_tiles, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * 128, block_tiles * 4)


def unswizzle_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of `swizzle_scales`: back to compact scales [rows, blocks]."""
    padded_rows, padded_blocks = _matrix(swizzled)
    if (padded_rows, padded_blocks) != (round_up(rows, 128), round_up(blocks, 4)):
        raise ValueError(
            f"swizzled scales for [{rows}, {blocks}] have the shape "
            f"[{round_up(rows, 128)}, {round_up(blocks, 4)}], not [{padded_rows}, {padded_blocks}]"
        )
    tiles = swizzled.reshape(padded_rows // 128, padded_blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded_rows, padded_blocks)[:rows, :blocks].contiguous()


def _matrix(scales: Tensor) -> tuple[int, int]:
    if scales.dim() != 2:
        raise ValueError(f"scales are a matrix [rows, blocks], not of shape {list(scales.shape)}")
    return scales.shape[0], scales.shape[1]
