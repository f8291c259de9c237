"""One encoding of a matrix in memory: the plane, groups of planes, slices and rows of planes, planes on the wire."""

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

__all__ = [
    "COLUMNWISE",
    "ROWWISE",
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
