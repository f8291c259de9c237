"""A part of a tensor is rounded by the random numbers that its positions have in the whole tensor."""

import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import DEFAULT_SIGN_MASK, get_format, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import GroupedTarget, Target, Within
from crossgrain.kernels.reference.random_bits import random_bytes
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction, empty_plane
from crossgrain.planes.groups import empty_groups
from crossgrain.planes.slicing import slice_plane

CPU = torch.device("cpu")
M, K, SEED = 192, 320, 2**40 + 17
FORMATS = {
    "nvfp4": nvfp4_format(),
    "nvfp4_2d": nvfp4_format(two_d=True),
    "nvfp4_rht": nvfp4_format(rotation=DEFAULT_SIGN_MASK),
    "mxfp4": get_format("mxfp4"),
    "mxfp6": get_format("mxfp6_e2m3"),
    "mxfp8": get_format("mxfp8"),
    "fp8": get_format("fp8"),
}
PARTS = [(0, 96, 0, K), (96, 192, 0, K), (0, M, 64, 192), (32, 160, 256, 320)]  # rows, columns
OF_BOTH = [("nvfp4", "nvfp4_rht"), ("nvfp4", "mxfp8_nearest"), ("mxfp4", "nvfp4")]


def numbers():
    return torch.randn(M, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def encoding_of(name):
    nearest = name.endswith("_nearest")
    return Encoding(FORMATS[name.removesuffix("_nearest")], stochastic=not nearest)


def written(x, wanted, amaxes, within):
    """The planes of ``wanted``, pairs of direction and encoding, made in one call."""
    planes = [empty_plane(encoding.format, direction, x.shape, device=CPU) for direction, encoding in wanted]
    targets = [
        Target(plane, encoding, amax, None, within)
        for plane, (_, encoding), amax in zip(planes, wanted, amaxes, strict=True)
    ]
    kernels.encode(x, targets, SEED)
    return planes


def assert_parts_are_of_the_whole(wanted):
    x = numbers()
    planes = [empty_plane(encoding.format, direction, x.shape, device=CPU) for direction, encoding in wanted]
    targets = [Target(plane, encoding) for plane, (_, encoding) in zip(planes, wanted, strict=True)]
    amaxes = [target.amax for target in kernels.measure(x, targets)]
    whole = written(x, wanted, amaxes, None)
    for top, bottom, left, right in PARTS:
        piece = x[top:bottom, left:right].contiguous()
        for plane, part in zip(whole, written(piece, wanted, amaxes, Within(top, left, K)), strict=True):
            expected = slice_plane(slice_plane(plane, plane.shape, 0, top, bottom), (bottom - top, K), 1, left, right)
            assert torch.equal(part.operand_codes(), expected.operand_codes()), (part.format.name, part.direction)
            assert torch.equal(part.operand_scales(), expected.operand_scales())


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    kernels.set_backend(request.param)
    yield request.param
    kernels.set_backend("auto")


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_has_the_codes_of_the_whole(backend, name):
    for direction in (COLUMNWISE,) if name == "nvfp4_rht" else Direction:
        assert_parts_are_of_the_whole([(direction, encoding_of(name))])


@pytest.mark.parametrize("row, column", OF_BOTH)
def test_two_planes_of_a_part_have_the_codes_of_the_whole(backend, row, column):
    assert_parts_are_of_the_whole([(ROWWISE, encoding_of(row)), (COLUMNWISE, encoding_of(column))])


def test_groups_of_rows_of_some_columns_have_the_codes_of_all_columns(backend):
    x, heights, left, right = numbers(), [64, 0, 128], 64, 192
    encoding = encoding_of("nvfp4_rht")
    amax = torch.full((len(heights),), 4.0)

    def groups(rows, within):
        planes = empty_groups(encoding.format, COLUMNWISE, heights, rows.shape[1], device=CPU, transposed=True)
        kernels.encode_groups(rows, [GroupedTarget(planes, encoding, amax, None, within)], [3, 4, 5])
        return [plane.operand_codes() for plane in planes.planes]

    whole, part = groups(x, None), groups(x[:, left:right].contiguous(), Within(0, left, K))
    for all_columns, some in zip(whole, part, strict=True):
        assert torch.equal(some, all_columns[left:right])


@pytest.mark.parametrize("source", ["hash", "philox"])
@pytest.mark.parametrize("direction", list(Direction))
def test_random_bytes_of_a_part_that_begins_anywhere(direction, source):
    rows, columns = 21, 30
    rowwise = direction is ROWWISE
    whole = random_bytes(5, direction, (rows, columns) if rowwise else (columns, rows), CPU, source)
    whole = whole if rowwise else whole.t()
    for top, bottom, left, right in ((0, 21, 0, 30), (3, 9, 5, 6), (10, 21, 7, 30), (1, 2, 29, 30)):
        shape = (bottom - top, right - left)
        part = random_bytes(5, direction, shape if rowwise else shape[::-1], CPU, source, Within(top, left, columns))
        assert torch.equal(part if rowwise else part.t(), whole[top:bottom, left:right])


def test_kernels_leave_a_part_that_begins_inside_a_random_word_to_the_reference():
    x, encoding = numbers()[:, :64].contiguous(), encoding_of("nvfp4")
    amax, within = torch.full((1,), 4.0), Within(0, 6, K)
    (found,) = written(x, [(ROWWISE, encoding)], [amax], within)
    kernels.set_backend("reference")
    try:
        (expected,) = written(x, [(ROWWISE, encoding)], [amax], within)
    finally:
        kernels.set_backend("auto")
    assert torch.equal(found.data, expected.data)
