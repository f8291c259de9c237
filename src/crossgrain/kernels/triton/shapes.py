"""The sizes of tiles. They are fixed, so that nothing is tried out while a model trains."""

from __future__ import annotations

from typing import NamedTuple

from .kinds import EncodingKind, PlaneKind


class Tile(NamedTuple):
    """The tile of a program: rows and columns of the matrix (of the operand, for decoding), and its warps."""

    rows: int
    columns: int
    warps: int


def encoding_tile(row: EncodingKind | None, column: EncodingKind | None) -> Tile:
    """The tile for writing one or two planes: it holds whole blocks of both."""
    planes = [kind.plane for kind in (row, column) if kind is not None]
    if any(plane.sixteen for plane in planes):
        return Tile(128, 64, 4)
    rows = max([32, *(plane.block_rows if plane.rowwise else plane.block_length for plane in planes)])
    columns = max([128, *(plane.block_length if plane.rowwise else plane.block_rows for plane in planes)])
    return Tile(rows, columns, max(2, rows * columns // 2048))


def measuring_tile(rotated: bool) -> Tile:
    """The tile for amaxes."""
    return Tile(128, 64, 4) if rotated else Tile(16, 512, 4)


def decoding_tile(plane: PlaneKind) -> Tile:
    """The tile for decoding: it holds whole blocks."""
    rows, columns = max(32, plane.block_rows), max(128, plane.block_length)
    return Tile(rows, columns, max(4, rows * columns // 2048)) if plane.operand_major else Tile(columns, rows, 4)


EPILOGUE_TILE = Tile(16, 256, 4)
"""The tile of the end of GEMMs."""

SWIZZLED_TILES = 4
"""Tiles of 128x4 scales for each program that swizzles them."""
