"""Convert scales between the compact layout of crossgrain and the swizzled layout that GEMMs of GPUs read.

Scales [R, C] are divided into tiles of 128x4. In a tile, row i and column j are at byte
``(i % 32) * 16 + (i // 32) * 4 + j``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..planes import round_up


def swizzle_scales(scales: Tensor) -> Tensor:
    """Convert compact scales to the swizzled layout, see `kernels.swizzle_scales`."""
    rows, blocks = scales.shape
    row_tiles, block_tiles = round_up(rows, 128) // 128, round_up(blocks, 4) // 4
    padded = torch.nn.functional.pad(scales, (0, block_tiles * 4 - blocks, 0, row_tiles * 128 - rows))
    tiles = padded.reshape(row_tiles, 4, 32, block_tiles, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * 128, block_tiles * 4)


def unswizzle_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """Convert swizzled scales to the compact layout: the inverse of `swizzle_scales`.

    Args:
        swizzled: swizzled scales.
        rows: rows of the compact scales, without padding.
        blocks: columns of the compact scales, without padding.

    Returns:
        Compact scales [rows, blocks].

    Raises:
        ValueError: the swizzled scales do not have the padded shape.

    Examples:
        >>> scales = torch.arange(128 * 4, dtype=torch.uint8).view(128, 4)
        >>> swizzled = cg.swizzle_scales(scales)
        >>> torch.equal(cg.unswizzle_scales(swizzled, 128, 4), scales)
        True
    """
    check_is_matrix(swizzled)
    padded_rows, padded_blocks = swizzled.shape
    if (padded_rows, padded_blocks) != (round_up(rows, 128), round_up(blocks, 4)):
        raise ValueError(
            f"swizzled scales for [{rows}, {blocks}] must have shape "
            f"[{round_up(rows, 128)}, {round_up(blocks, 4)}], got [{padded_rows}, {padded_blocks}]"
        )
    tiles = swizzled.reshape(padded_rows // 128, padded_blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded_rows, padded_blocks)[:rows, :blocks].contiguous()


def check_is_matrix(scales: Tensor) -> None:
    """Raise ValueError if scales are not a matrix."""
    if scales.dim() != 2:
        raise ValueError(f"scales must be a matrix [rows, blocks], got shape {list(scales.shape)}")
