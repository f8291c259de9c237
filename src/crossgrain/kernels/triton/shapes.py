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
    """The tile for writing one or two planes: it holds whole blocks of both.

    Larger tiles would spill registers, smaller ones load and store less than 16 bytes at once, and more warps exchange
    amaxes through memory with conflicts between banks. Tests keep all of this.
    """
    planes = [kind.plane for kind in (row, column) if kind is not None]
    rows = max(plane.block_rows if plane.rowwise else plane.block_length for plane in planes)
    columns = max(plane.block_length if plane.rowwise else plane.block_rows for plane in planes)
    if any(plane.sixteen for plane in planes):
        if columns > 64:  # with another format, whose blocks are longer
            return Tile(128, columns, 8)
        return Tile(128, 128, 4) if row is None and _fits_in_registers(column) else Tile(128, 64, 4)
    if all(plane.block_length == 0 for plane in planes):
        return Tile(32, 128, 2)
    stochastic = any(kind.stochastic for kind in (row, column) if kind is not None)
    if rows > 32 or columns > (32 if stochastic else 64):
        rows, columns = max(32, rows), max(32, columns)
        each = 4096 if not stochastic else 1024 if planes[0].hardware.crowded else 2048  # numbers of a warp
        return Tile(rows, columns, max(1, rows * columns // each))
    return Tile(32, 32, 1) if stochastic else Tile(32, 64, 1)


def _fits_in_registers(column: EncodingKind | None) -> bool:
    """Whether a thread can hold 128 numbers of a column of NVFP4, and what it needs to write them."""
    if column is None or column.four_over_six:
        return False
    hardware = column.plane.hardware
    return not column.stochastic or (hardware.fp8 and not hardware.pairs)


def measuring_tile(rotated: bool) -> Tile:
    """The tile for amaxes."""
    return Tile(128, 64, 4) if rotated else Tile(16, 512, 4)


def decoding_tile(plane: PlaneKind) -> Tile:
    """The tile for decoding: it holds whole blocks."""
    along, across = plane.block_length, plane.block_rows  # in the order of codes in memory
    if not plane.operand_major:
        along, across = across, along
    if plane.element.bits == 4 and along <= 512 and across <= 16:  # long rows: more codes for each address
        return Tile(16, 512, 1)
    height, length = max(32, across), max(256, along)
    if across > 32:
        length = max(32, along)
    warps = max(1, height * length // 4096)
    return Tile(height, length, warps) if plane.operand_major else Tile(length, height, warps)


def marking_tile(plane: PlaneKind) -> Tile:
    """The tile for marking NaNs: it holds whole blocks."""
    rows, columns = max(32, plane.block_rows), max(32, plane.block_length)
    return Tile(rows, columns, 4) if plane.rowwise else Tile(columns, rows, 4)


EPILOGUE_TILE = Tile(16, 256, 4)
"""The tile of the end of GEMMs."""

SWIZZLED_TILES = 4
"""Tiles of 128x4 scales for each program that swizzles them."""
