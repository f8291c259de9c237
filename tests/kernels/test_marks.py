"""NaNs and infinities that formats cannot hold: kernels notice them, and marks keep them visible."""

import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import formats, get_format
from crossgrain.formats.dtypes import HIGH_PRECISION
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE, Target
from crossgrain.kernels.marks import loses_nonfinite, mark_nonfinite
from crossgrain.planes import ROWWISE, empty_plane

from ..common.planes import BOTH_DIRECTIONS, CPU, EVERY_FORMAT, assert_same_plane, normal

BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
SHAPE = (160, 96)  # more than one tile, the last one not whole
PLACE = (131, 50)


def encoded(x, fmt, direction, backend=kernels):
    """A plane, and whether the kernels saw a NaN or an infinity."""
    plane = empty_plane(fmt, direction, x.shape, device=CPU)
    (target,) = kernels.measure(x, [Target(plane, Encoding(fmt))])
    return plane, backend.encode(x, [target], None)


def numbers(dtype=torch.float32, shape=SHAPE):
    return normal(*shape).to(dtype)


@EVERY_FORMAT
@BOTH_DIRECTIONS
@pytest.mark.parametrize("dtype", HIGH_PRECISION, ids=str)
def test_kernels_notice_every_nonfinite_number(fmt, direction, dtype):
    x = numbers(dtype)
    assert encoded(x, fmt, direction)[1] is False
    x[5, 7] = torch.finfo(dtype).max  # the largest finite number is one
    if fmt.rotation is None:
        assert encoded(x, fmt, direction)[1] is False
    for bad in BAD.values():
        for place in ((0, 0), PLACE, (159, 95)):
            x = numbers(dtype)
            x[place] = bad
            assert encoded(x, fmt, direction)[1] is True


@EVERY_FORMAT
@BOTH_DIRECTIONS
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_mark_shows_the_number_and_changes_nothing_outside_of_its_block(fmt, direction, bad):
    x = numbers()
    x[PLACE] = bad
    plane, _ = encoded(x, fmt, direction)
    before = kernels.decode(plane, torch.float32)
    mark_nonfinite(x, plane)
    after = kernels.decode(plane, torch.float32)
    assert not after[PLACE].isfinite()
    changed = (before.view(torch.int32) != after.view(torch.int32)).nonzero()
    if not before[PLACE].isfinite():
        assert not len(changed)
    for where in changed.tolist():
        here, there = (tuple(place) if direction is ROWWISE else tuple(place)[::-1] for place in (where, PLACE))
        assert [i // n for i, n in zip(here, blocks(fmt), strict=True)] == [
            i // n for i, n in zip(there, blocks(fmt), strict=True)
        ]


def blocks(fmt):
    return fmt.block_rows, fmt.block_length


@EVERY_FORMAT
@BOTH_DIRECTIONS
def test_marks_are_the_same_on_the_reference(fmt, direction):
    x = numbers()
    x[PLACE], x[3, 3], x[90, 17] = torch.nan, torch.inf, -torch.inf
    planes = []
    for backend in (kernels, REFERENCE):
        plane, seen = encoded(x, fmt, direction, backend)
        assert seen is True
        mark_nonfinite(x, plane)
        planes.append(plane)
    assert_same_plane(*planes)


def test_formats_that_keep_everything_are_not_touched():
    kept = {fmt.name for fmt in formats() if not loses_nonfinite(fmt)}
    assert kept >= {"identity", "mxfp8", "mxfp8_e5m2", "mxfp8_2d"}
    assert not kept & {"nvfp4", "mxfp4", "mxfp6_e2m3", "mxint8", "fp8", "fp8_block", "hifloat8"}


def test_on_the_meta_device_nobody_knows():
    x = torch.empty(32, 32, device="meta")
    plane = empty_plane(get_format("nvfp4"), ROWWISE, x.shape, device=x.device)
    (target,) = kernels.measure(x, [Target(plane, Encoding(plane.format))])
    assert kernels.encode(x, [target]) is None
    mark_nonfinite(x, plane)
