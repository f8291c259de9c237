"""Planes: a plane is one encoding of a matrix in memory. Also groups, slices and rows of planes, and sending planes."""

from .plane import (
    COLUMNWISE,
    ROWWISE,
    Direction,
    Plane,
    PlanePair,
    PlaneSource,
    bytes_per_row,
    data_shape,
    empty_plane,
    matrix_shape,
    overlaps,
    round_up,
    same_codes_in_both,
    scale_shape,
    shape_problem,
)
from .slicing import CutsBlocks

__all__ = [
    "COLUMNWISE",
    "ROWWISE",
    "CutsBlocks",
    "Direction",
    "Plane",
    "PlanePair",
    "PlaneSource",
    "bytes_per_row",
    "data_shape",
    "empty_plane",
    "matrix_shape",
    "overlaps",
    "round_up",
    "same_codes_in_both",
    "scale_shape",
    "shape_problem",
]
