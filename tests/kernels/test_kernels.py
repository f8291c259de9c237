"""Planes at the edges: special values, odd shapes, storage layouts, and the worked examples of the specification."""

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import (
    E4M3,
    E5M2,
    Element,
    fp8_block_format,
    get_format,
    mxfp8_format,
    nvfp4_format,
)
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Target
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction

from ..common.golden_cases import encoded
from ..common.planes import (
    BOTH_DIRECTIONS,
    EVERY_BLOCK_FORMAT,
    EVERY_FORMAT,
    EVERY_UNROTATED_FORMAT,
    QUANTIZED,
    UNROTATED,
    assert_same_plane,
    by_name,
    codes_of,
    normal,
)

# -- Special values ---------------------------------------------------------------------------------


@EVERY_UNROTATED_FORMAT
@BOTH_DIRECTIONS
def test_nan_does_not_count_for_any_scale(fmt, direction):
    x = normal(128, 128)
    x[3, 5] = x[64, 64] = 0.0
    reference = encoded(x, Encoding(fmt), direction)
    x[3, 5], x[64, 64] = torch.nan, -torch.tensor(torch.nan)
    plane = encoded(x, Encoding(fmt), direction)
    assert torch.equal(plane.scale, reference.scale)
    is_nan = (x if direction is ROWWISE else x.t()).isnan()
    assert (codes_of(plane)[is_nan] == fmt.element.nan_code).all()
    assert torch.equal(codes_of(plane)[~is_nan], codes_of(reference)[~is_nan])


@EVERY_UNROTATED_FORMAT
@BOTH_DIRECTIONS
def test_a_tensor_of_nans_is_scaled_like_zeros(fmt, direction):
    x = torch.full((128, 128), torch.nan)
    plane, zeros = encoded(x, Encoding(fmt), direction), encoded(torch.zeros(128, 128), Encoding(fmt), direction)
    assert torch.equal(plane.scale, zeros.scale)
    assert (codes_of(plane) == fmt.element.nan_code).all()


@EVERY_FORMAT
@BOTH_DIRECTIONS
def test_zeros_decode_to_zeros(fmt, direction):
    plane = encoded(torch.zeros(128, 128), Encoding(fmt), direction)
    assert not codes_of(plane).any()
    if fmt.scale_rule == "fp32":
        assert (plane.operand_scales() == 1.0).all()
    else:
        assert not plane.operand_scales().any()
    assert torch.equal(kernels.decode(plane, torch.float32), torch.zeros(128, 128))


@EVERY_BLOCK_FORMAT
def test_a_zero_block_among_others(fmt):
    x = normal(128, 256)
    x[:, :128] = 0.0
    decoded = kernels.decode(encoded(x, Encoding(fmt), ROWWISE), torch.float32)
    assert not decoded[:, :128].any()
    assert decoded[:, 128:].any()


@EVERY_UNROTATED_FORMAT
@BOTH_DIRECTIONS
def test_negative_zero_keeps_its_sign(fmt, direction):
    x = normal(128, 128)
    x[0, 0] = -0.0
    plane = encoded(x, Encoding(fmt), direction)
    has_two_zeros = isinstance(fmt.element, Element)  # MXINT8 and HiFloat8 have one
    assert codes_of(plane)[0, 0] == (fmt.element.sign_bit if has_two_zeros else 0)
    decoded = kernels.decode(plane, torch.float32)
    assert decoded[0, 0] == 0 and decoded[0, 0].signbit() == has_two_zeros


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp8_block", "fp8_block_2d"])
@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_infinity_makes_an_fp32_scale_one(name, infinity):
    """The infinite number saturates; the others are cast as they are."""
    x = torch.full((128, 128), 3.0)
    x[0, 0] = infinity
    plane = encoded(x, Encoding(get_format(name)), ROWWISE)
    decoded = kernels.decode(plane, torch.float32)
    assert plane.operand_scales()[0, 0] == 1.0
    assert decoded[0, 0] == (plane.format.element.max if infinity > 0 else -plane.format.element.max)
    assert decoded[0, 1] == 3.0


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
def test_infinity_in_mxfp8(element):
    x = torch.ones(2, 32)
    x[0, :2] = torch.tensor([torch.inf, -torch.inf])
    plane = encoded(x, Encoding(mxfp8_format(element)), ROWWISE)
    assert plane.operand_scales()[0, 0] == 0xFE
    assert plane.data[0, :2].tolist() == [element.max_code, element.max_code | 0x80]
    decoded = kernels.decode(plane, torch.float32)
    assert decoded[0, :3].tolist() == [torch.inf, -torch.inf, 0.0]
    assert (decoded[1] == 1.0).all(), "other blocks do not suffer"


def test_infinity_in_nvfp4():
    """The global scale is then 1: the block with the infinity saturates, the others are scaled by themselves."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = torch.inf, 6.0
    plane = encoded(x, Encoding(nvfp4_format()), ROWWISE)
    assert plane.amax.item() == torch.inf
    assert plane.operand_scales().tolist() == [[0x7E, 0x38]]  # 448 and 1
    assert codes_of(plane)[0, [0, 16]].tolist() == [7, 7]


def test_a_block_too_small_for_its_scale_decodes_to_zero():
    """NVFP4: the block scale underflows to 0 next to A = 1000; the codes keep the signs."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 1000.0, 1e-4, -1e-5
    plane = encoded(x, Encoding(nvfp4_format()), ROWWISE)
    assert plane.operand_scales().tolist() == [[0x7E, 0x00]]
    assert codes_of(plane)[0, 16:19].tolist() == [7, 15, 0]
    decoded = kernels.decode(plane, torch.float32)
    assert not decoded[0, 16:].any()
    assert decoded[0, 16:18].signbit().tolist() == [False, True]


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp8_block", "fp8_block_2d", "mxfp8", "mxfp8_e5m2", "mxfp8_2d"])
@pytest.mark.parametrize("magnitude", [1e-38, 1e-40])
def test_subnormal_numbers_are_not_flushed(name, magnitude):
    """Their scales are subnormal too, down to 2**-127 or so, where the numbers still are normal codes."""
    x = torch.full((128, 128), magnitude)
    plane = encoded(x, Encoding(get_format(name)), ROWWISE)
    decoded = kernels.decode(plane, torch.float32)
    torch.testing.assert_close(decoded, x, rtol=0.13, atol=0)


def test_flush_to_zero_is_refused_by_name():
    x, encoding = torch.ones(2, 32), Encoding(mxfp8_format())
    plane = encoded(x, encoding, ROWWISE)
    calls = {
        "measure": lambda: kernels.measure(x, [Target(plane, encoding)]),
        "encode": lambda: kernels.encode(x, [Target(plane, encoding)]),
        "decode": lambda: kernels.decode(plane, torch.float32),
        "decode_operand": lambda: kernels.decode_operand(plane),
    }
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush to zero")
        for call in calls.values():
            with pytest.raises(RuntimeError, match="set_flush_denormal"):
                call()
    finally:
        torch.set_flush_denormal(False)
    for call in calls.values():
        call()


# -- Shapes -----------------------------------------------------------------------------------------


@EVERY_FORMAT
@BOTH_DIRECTIONS
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0), (2, 0, 128), (0, 3, 128)], ids=str)
def test_empty_tensors(fmt, direction, shape):
    plane = encoded(torch.empty(shape), Encoding(fmt), direction)
    assert plane.data.numel() == 0
    if fmt.block is None:
        assert plane.scale.tolist() == [1.0]
    if fmt.global_amax == "tensor":
        assert plane.amax.tolist() == [0.0]
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    assert kernels.decode(plane, torch.bfloat16).shape == (rows, cols)
    assert kernels.decode_operand(plane).shape == ((rows, cols) if direction is ROWWISE else (cols, rows))


@EVERY_FORMAT
@BOTH_DIRECTIONS
@pytest.mark.parametrize("shape", [(2, 64, 128), (2, 4, 16, 128), (1, 1, 128, 128)], ids=str)
def test_leading_dimensions_are_rows(fmt, direction, shape):
    x = normal(*shape)
    plane, flat = encoded(x, Encoding(fmt), direction), encoded(x.flatten(0, -2), Encoding(fmt), direction)
    assert plane.shape == flat.shape == (128, 128)
    assert_same_plane(plane, flat)
    assert torch.equal(kernels.decode(plane, torch.float32), kernels.decode(flat, torch.float32))


@pytest.mark.parametrize(
    "name, direction, expected",
    [
        ("fp8", ROWWISE, (2, 32, 128)),
        ("fp8", COLUMNWISE, (128, 2, 32)),
        ("mxfp8", COLUMNWISE, (2, 32, 128)),
        ("nvfp4", ROWWISE, (2, 32, 64)),
        ("nvfp4", COLUMNWISE, (128, 32)),
    ],
)
def test_code_buffers_of_three_dimensions(name, direction, expected):
    """[K, M] planes move the last dimension to the front; packed ones flatten the rest, which runs along the blocks."""
    assert encoded(normal(2, 32, 128), Encoding(get_format(name)), direction).data.shape == expected


@EVERY_FORMAT
@BOTH_DIRECTIONS
def test_strides_of_the_input_do_not_matter(fmt, direction):
    wide = normal(128, 256)
    for view in (wide[:, ::2], normal(128, 128).t(), normal(256, 128)[::2], wide.view(2, 64, 256).transpose(0, 1)):
        assert not view.is_contiguous()
        plane, copied = (encoded(x, Encoding(fmt), direction) for x in (view, view.contiguous()))
        assert_same_plane(plane, copied)


@pytest.mark.parametrize("fmt", [fmt for fmt in QUANTIZED if fmt.block], **by_name)
def test_a_single_block(fmt):
    """One block decodes as that block does inside a larger tensor with the same largest number."""
    rows, length = fmt.block
    block = normal(rows, length)
    block[:, 0] = 6.0
    alone = kernels.decode(encoded(block, Encoding(fmt), ROWWISE), torch.float32)
    tiled = kernels.decode(encoded(block.tile(2, 3), Encoding(fmt), ROWWISE), torch.float32)
    assert torch.equal(alone.tile(2, 3), tiled)


@EVERY_FORMAT
@BOTH_DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_of_the_input_does_not_matter(fmt, direction, dtype):
    """Numbers that fp32, bf16 and fp16 can all represent give the same bytes, also when rotated."""
    x = torch.randint(-255, 256, (128, 128), generator=torch.Generator().manual_seed(0)) / 64
    assert torch.equal(x, x.to(dtype).float())
    assert_same_plane(encoded(x.to(dtype), Encoding(fmt), direction), encoded(x, Encoding(fmt), direction))


@pytest.mark.parametrize("shape", [(1, 1), (1, 129), (5, 128), (130, 257), (127, 1)], ids=str)
@pytest.mark.parametrize("two_d", [False, True], ids=["1x128", "128x128"])
@BOTH_DIRECTIONS
def test_ragged_fp8_blocks_are_zero_padded_blocks(shape, two_d, direction):
    x = normal(*shape)
    padded = torch.zeros([-(-n // 128) * 128 for n in shape])
    padded[: shape[0], : shape[1]] = x
    encoding = Encoding(fp8_block_format(two_d=two_d), power_of_two=True)
    plane, full = encoded(x, encoding, direction), encoded(padded, encoding, direction)
    rows, cols = plane.operand_shape
    assert torch.equal(plane.operand_codes(), full.operand_codes()[:rows, :cols])
    scales = plane.operand_scales()
    assert torch.equal(scales, full.operand_scales()[: scales.shape[0], : scales.shape[1]])
    assert torch.equal(
        kernels.decode(plane, torch.float32), kernels.decode(full, torch.float32)[: shape[0], : shape[1]]
    )


@pytest.mark.parametrize(
    "name, direction, shape, expected",
    [
        ("fp8", ROWWISE, (5, 7), (1,)),
        ("fp8_block", ROWWISE, (130, 257), (3, 132)),
        ("fp8_block", COLUMNWISE, (130, 257), (2, 260)),
        ("fp8_block_2d", ROWWISE, (130, 257), (2, 4)),
        ("fp8_block_2d", COLUMNWISE, (130, 257), (3, 4)),
        ("mxfp8", ROWWISE, (64, 160), (128, 8)),
        ("mxfp8", COLUMNWISE, (64, 160), (4, 256)),
        ("nvfp4", ROWWISE, (48, 80), (128, 8)),
        ("nvfp4", COLUMNWISE, (48, 80), (128, 4)),
        ("nvfp4_2d", ROWWISE, (48, 80), (128, 8)),
    ],
)
def test_scale_buffers_are_padded_for_the_gemm_with_zeros(name, direction, shape, expected):
    plane = encoded(torch.ones(shape), Encoding(get_format(name)), direction)
    assert plane.scale.shape == expected
    assert plane.scale.count_nonzero() == plane.operand_scales().numel(), "scales of ones are not zero, padding is"


# -- Directions -------------------------------------------------------------------------------------


@EVERY_UNROTATED_FORMAT
def test_a_columnwise_plane_is_the_rowwise_plane_of_the_transpose(fmt):
    x = normal(128, 256)
    column, row = encoded(x, Encoding(fmt), COLUMNWISE), encoded(x.t(), Encoding(fmt), ROWWISE)
    assert torch.equal(column.operand_codes(), row.operand_codes())
    assert torch.equal(column.operand_scales(), row.operand_scales())
    assert torch.equal(kernels.decode_operand(column), kernels.decode_operand(row))
    assert torch.equal(kernels.decode(column, torch.float32), kernels.decode(row, torch.float32).t())


@pytest.mark.parametrize("fmt", [fmt for fmt in UNROTATED if fmt.is_symmetric], **by_name)
def test_symmetric_formats_decode_the_same_in_both_directions(fmt):
    x = normal(256, 384)
    row, column = (kernels.decode(encoded(x, Encoding(fmt), direction), torch.float32) for direction in Direction)
    assert torch.equal(row, column)
