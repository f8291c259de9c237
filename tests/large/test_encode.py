"""Measuring and encoding beyond 2**31 numbers: parts of planes are what the reference makes of parts of the matrix."""

import pytest
import torch

from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.kernels import REFERENCE, Target
from crossgrain.planes import empty_plane
from crossgrain.planes.groups import empty_groups

from ..common.encodings import ENCODINGS, SEED
from .parts import COUNT, CPU, HEIGHT, PART, WIDTH, assert_part_is_right, gigabytes_of, parts, written

VIEWS = {"tall": (HEIGHT, WIDTH), "wide": (PART, COUNT // PART)}
PLANES = [  # for each kernel: what it writes rowwise and columnwise
    ("mxfp8", None),
    ("mxfp4_sr", None),
    ("nvfp4_rht_sr", None),
    ("nvfp4_row_scaled", None),
    ("nvfp4_4over6_448", None),
    ("nvfp4_2d", None),
    ("fp8", None),
    (None, "mxfp8"),
    (None, "mxfp6_e3m2"),
    (None, "nvfp4_rht_sr"),
    (None, "nvfp4_row_scaled"),
    ("mxfp8", "nvfp4_rht_sr"),
    ("nvfp4", "mxfp8"),
    ("mxfp8_2d", "mxfp8_2d"),
    ("fp8_block", "fp8_block"),
    ("fp8_block_2d", "fp8_block_2d"),
    ("nvfp4_2d", "nvfp4_2d"),
    ("fp8", "fp8"),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("row, column", PLANES, ids=lambda name: name or "-")
def test_encode(row, column, view, tall, needs, monkeypatch):
    wanted = [(way, ENCODINGS[name](way)) for way, name in ((ROWWISE, row), (COLUMNWISE, column)) if name]
    needs(gigabytes_of(*wanted))
    x = tall.view(VIEWS[view])
    for target in written(x, wanted):
        for axis, start in parts(x.shape):
            assert_part_is_right(x, target, axis, start, monkeypatch)


@pytest.mark.parametrize("view", VIEWS)
def test_measure(view, tall, needs):
    needs(0.3)
    x = tall.view(VIEWS[view])
    assert kernels.amax(x).item() == 5.0, "the last number is the largest"
    for way in (ROWWISE, COLUMNWISE):
        encoding = ENCODINGS["nvfp4_row_scaled"](way)
        plane = empty_plane(encoding.format, way, x.shape, device=torch.device("meta"))
        (found,) = kernels.choice.backend_for("cpu").measure(x, [Target(plane, encoding)])
        dim = 1 if way is ROWWISE else 0
        expected = torch.cat([part.abs().amax(dim) for part in x.split(1 << 14, 1 - dim)])
        assert torch.equal(found, expected.float())


@pytest.mark.parametrize("names", [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4_rht_sr"), ("fp8_block", "fp8")], ids="+".join)
def test_groups(names, tall, needs):
    """Three groups, of which the last lies beyond 2**31 numbers; each gets the bytes that it gets alone."""
    wanted = [(way, ENCODINGS[name](way)) for way, name in zip((ROWWISE, COLUMNWISE), names, strict=True)]
    needs(gigabytes_of(*wanted))
    heights = (256, HEIGHT - 384, 128)
    targets = []
    for way, encoding in wanted:
        planes = empty_groups(encoding.format, way, heights, WIDTH, device=CPU)
        targets.append(kernels.GroupedTarget(planes, encoding))
    targets = kernels.measure_groups(tall, targets)
    kernels.encode_groups(tall, targets, [SEED, SEED + 1, SEED + 2])
    for group, start in ((0, 0), (2, HEIGHT - 128)):
        rows = tall[start : start + heights[group]]
        for target in targets:
            alone = empty_plane(target.encoding.format, target.planes.direction, rows.shape, device=CPU)
            (measured,) = REFERENCE.measure(rows, [Target(alone, target.encoding)])
            REFERENCE.encode(rows, [Target(alone, target.encoding, measured)], SEED + group)
            found = target.planes.planes[group]
            assert torch.equal(found.operand_codes(), alone.operand_codes())
            assert torch.equal(found.operand_scales(), alone.operand_scales())
