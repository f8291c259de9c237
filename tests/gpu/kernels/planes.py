"""Planes whose bytes nobody has computed: every code, every scale and every kind of amax, also those that no encoder
writes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from crossgrain.formats import Format
from crossgrain.planes import COLUMNWISE, Direction, Plane, empty_plane
from crossgrain.planes.plane import stored_by_columns

_AMAXES = (1.0, 0.0, 1e-45, 1e-39, 3.4e38, math.inf, math.nan, 2688.0)


def arbitrary_plane(
    fmt: Format,
    direction: Direction,
    shape: tuple[int, int],
    *,
    amax: float | None = None,
    blocked_columns: bool = False,
) -> Plane:
    """A plane of random bytes.

    Args:
        fmt: the format.
        direction: the direction.
        shape: shape of the matrix.
        amax: the amax of the tensor; None for several, if there is one for each row, or else for 3.
        blocked_columns: columns of a plane that is not stored transposed lie in memory one after the other.
    """
    generator = torch.Generator().manual_seed(shape[0] + 1000 * shape[1])
    plane = empty_plane(fmt, direction, shape, device=torch.device("cpu"))
    if blocked_columns and direction is COLUMNWISE and not plane.transposed:
        plane = replace(plane, data=stored_by_columns(plane.data))
    for buffer in (plane.data, plane.scale):
        assert buffer is not None
        _fill(buffer, generator)
    if plane.amax is not None:
        amaxes = torch.tensor(_AMAXES if amax is None else (amax,))
        plane.amax.copy_(amaxes.repeat(-(-plane.amax.numel() // len(amaxes)))[: plane.amax.numel()])
        if amax is None and plane.amax.numel() == 1:
            plane.amax.fill_(3.0)
    return plane


def _fill(buffer: Tensor, generator: torch.Generator) -> None:
    """All bytes, and where there are fp32 numbers: all sizes, signs, infinities and NaNs."""
    if buffer.dtype == torch.uint8:
        bytes_ = torch.randint(0, 256, (buffer.numel(),), dtype=torch.uint8, generator=generator)
        bytes_[:256] = torch.arange(256, dtype=torch.uint8)[: len(bytes_)]
        buffer.copy_(bytes_.view(buffer.shape))
        return
    bits = torch.randint(-(2**31), 2**31 - 1, (buffer.numel(),), dtype=torch.int32, generator=generator)
    buffer.copy_(bits.view(torch.float32).view(buffer.shape))
