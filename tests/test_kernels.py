"""Planes at the edges: special values, odd shapes, storage layouts, and the worked examples of the specification."""

import dataclasses

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.encoding import Encoding
from crossgrain.formats import (
    DEFAULT_SIGN_MASK,
    E4M3,
    E5M2,
    IDENTITY,
    formats,
    fp8_block_format,
    fp8_format,
    get_format,
    mxfp8_format,
    nvfp4_format,
)
from crossgrain.kernels import Target
from crossgrain.kernels.reference import hadamard
from crossgrain.kernels.reference.packing import unpack
from crossgrain.kernels.reference.scaling import fp32_scales, global_scale, two_level_scales
from crossgrain.plane import COLUMNWISE, ROWWISE, Direction, Plane, empty_plane

from .golden_cases import encoded

CPU = torch.device("cpu")
RHT = nvfp4_format(rotation=DEFAULT_SIGN_MASK)
UNROTATED = [fmt for fmt in formats() if not fmt.is_identity]
QUANTIZED = [*UNROTATED, RHT]

by_name = {"ids": lambda fmt: fmt.name}
EVERY_FORMAT = pytest.mark.parametrize("fmt", QUANTIZED, **by_name)
EVERY_UNROTATED_FORMAT = pytest.mark.parametrize("fmt", UNROTATED, **by_name)
EVERY_BLOCK_FORMAT = pytest.mark.parametrize("fmt", [fmt for fmt in UNROTATED if fmt.block], **by_name)
BOTH_DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes_of(plane):
    """One code per element, as an operand."""
    return unpack(plane.operand_codes(), plane.format.element.bits)


def assert_same_plane(a, b):
    """Equal bytes; ``a`` may be the plane of a tensor with more dimensions."""
    assert a.format == b.format and a.direction is b.direction
    assert torch.equal(a.data.reshape(b.data.shape), b.data)
    assert torch.equal(a.scale, b.scale)
    assert (a.amax is None) == (b.amax is None)
    assert a.amax is None or torch.equal(a.amax, b.amax)


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
    assert codes_of(plane)[0, 0] == fmt.element.sign_bit
    decoded = kernels.decode(plane, torch.float32)
    assert decoded[0, 0] == 0 and decoded[0, 0].signbit()


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


def test_one_dimensional_column_codes_are_not_transposed_row_codes():
    x = normal(256, 256)
    row, column = (encoded(x, Encoding(fp8_block_format()), direction) for direction in Direction)
    assert not torch.equal(column.data, row.data.t())
    row, column = (encoded(x, Encoding(fp8_block_format(two_d=True)), direction) for direction in Direction)
    assert torch.equal(column.data, row.data.t())


@pytest.mark.parametrize("transposed", [True, False])
def test_per_tensor_fp8_columnwise_only(transposed):
    """Alone, and in either storage order: [K, M] as a separate copy, or the one buffer [M, K] for both."""
    x, encoding = normal(48, 80), Encoding(fp8_format())
    row = encoded(x, encoding, ROWWISE)
    column = empty_plane(encoding.format, COLUMNWISE, x.shape, device=CPU, transposed=transposed)
    kernels.encode(x, kernels.measure(x, [Target(column, encoding)]))
    assert torch.equal(column.data, row.data.t() if transposed else row.data)
    assert torch.equal(column.scale, row.scale)
    assert torch.equal(kernels.decode_operand(column), kernels.decode_operand(row).t())
    assert torch.equal(kernels.decode(column, torch.float32), kernels.decode(row, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@BOTH_DIRECTIONS
def test_identity_planes_keep_the_numbers(dtype, direction):
    x = normal(3, 5).to(dtype)
    plane = Plane(IDENTITY, direction, (3, 5), torch.empty_like(x))
    (target,) = kernels.measure(x, [Target(plane, Encoding(IDENTITY))])
    assert target.amax is None
    kernels.encode(x, [target])
    assert torch.equal(kernels.decode(plane, dtype), x)
    assert torch.equal(kernels.decode_operand(plane), (x if direction is ROWWISE else x.t()).float())


@EVERY_UNROTATED_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_to_a_narrow_dtype_rounds_once(fmt, dtype):
    plane = encoded(normal(128, 128), Encoding(fmt), ROWWISE)
    assert torch.equal(kernels.decode(plane, dtype), kernels.decode(plane, torch.float32).to(dtype))


def test_each_row_of_a_row_scaled_plane_is_a_tensor_of_its_own():
    x = normal(16, 64) * torch.logspace(-10, 10, 16)[:, None]
    plane = encoded(x, Encoding(nvfp4_format(row_scaled=True)), ROWWISE)
    for m in range(16):
        alone = encoded(x[m : m + 1], Encoding(nvfp4_format()), ROWWISE)
        assert torch.equal(plane.data[m : m + 1], alone.data)
        assert torch.equal(plane.operand_scales()[m : m + 1], alone.operand_scales())
        assert plane.amax[m] == alone.amax
    decoded = kernels.decode(plane, torch.float32)
    torch.testing.assert_close(decoded.norm(dim=1), x.norm(dim=1), rtol=0.1, atol=0)


# -- Targets ----------------------------------------------------------------------------------------


def test_one_call_fills_several_planes():
    x = normal(128, 128)
    encodings = [Encoding(fmt) for fmt in QUANTIZED]
    targets = [
        Target(empty_plane(encoding.format, direction, x.shape, device=CPU), encoding)
        for encoding in encodings
        for direction in Direction
    ]
    kernels.encode(x, kernels.measure(x, targets))
    for target in targets:
        assert_same_plane(target.plane, encoded(x, target.encoding, target.plane.direction))


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4_2d", "nvfp4_max256"])
def test_a_slice_with_the_amax_of_the_whole_has_the_bytes_of_the_whole(name):
    """What ranks do that hold a part each and reduce the amax first."""
    x, encoding = normal(64, 64), Encoding(get_format(name))
    x[-1, -1] = 10.0
    whole_plane = empty_plane(encoding.format, ROWWISE, x.shape, device=CPU)
    (whole,) = kernels.measure(x, [Target(whole_plane, encoding)])
    kernels.encode(x, [whole])
    part = x[:32]
    plane = empty_plane(encoding.format, ROWWISE, part.shape, device=CPU)
    (target,) = kernels.measure(part, [Target(plane, encoding, amax=whole.amax)])
    assert target.amax is whole.amax, "an amax that is given is not measured again"
    kernels.encode(part, [target])
    assert torch.equal(plane.data, whole_plane.data[:32])
    assert torch.equal(kernels.decode(plane, torch.float32), kernels.decode(whole_plane, torch.float32)[:32])


def test_a_scale_from_outside_saturates():
    x = torch.tensor([[1000.0, -1000.0, 1.0]])
    plane = encoded(x, Encoding(fp8_format()), ROWWISE, scale=torch.tensor([2.0]))
    assert kernels.decode(plane, torch.float32).tolist() == [[224.0, -224.0, 1.0]]
    assert plane.scale.tolist() == [0.5]


def test_encoding_does_not_touch_its_input():
    x = normal(128, 128)
    before = x.clone()
    for fmt in QUANTIZED:
        encoded(x, Encoding(fmt), COLUMNWISE)
    assert torch.equal(x, before)


def test_a_plane_decodes_without_the_encoding_that_made_it():
    """4-over-6 and power-of-two scales are choices of the writer; the reader needs only the format."""
    x = normal(128, 128)
    for encoding in (Encoding(nvfp4_format(), four_over_six="MAE"), Encoding(fp8_format(), power_of_two=True)):
        plane = encoded(x, encoding, ROWWISE)
        bare = dataclasses.replace(plane, data=plane.data.clone(), scale=plane.scale.clone())
        error = (kernels.decode(bare, torch.float32) - x).norm() / x.norm()
        assert error < 0.1


# -- Rotation ---------------------------------------------------------------------------------------


def test_the_rotation_is_orthogonal():
    matrix = hadamard.rotation_matrix(DEFAULT_SIGN_MASK).double()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    x = torch.randint(-8, 9, (4, 32), generator=torch.Generator().manual_seed(0)).float()
    rotated = hadamard.rotate(x, DEFAULT_SIGN_MASK)
    assert torch.equal(rotated.double(), (x.view(-1, 16).double() @ matrix).view(4, 32))
    assert torch.equal(hadamard.unrotate(rotated, DEFAULT_SIGN_MASK), x), "small integers: no rounding"


def test_documented_rotations():
    unit = torch.zeros(1, 16)
    unit[0, 0] = 4.0
    assert torch.equal(hadamard.rotate(unit, DEFAULT_SIGN_MASK), torch.ones(1, 16))
    # fmt: off
    expected = [-14.5, -7.5, 6.5, -0.5, 6.5, -0.5, -14.5, 8.5, 7.5, 14.5, 0.5, 1.5, 0.5, -2.5, 9.5, -15.5]
    # fmt: on
    assert hadamard.rotate(torch.arange(16.0).view(1, 16), DEFAULT_SIGN_MASK).tolist() == [expected]


@pytest.mark.parametrize("sign_mask", [DEFAULT_SIGN_MASK, 0])
def test_a_rotated_plane_decodes_unrotated(sign_mask):
    """`decode` is the operand times the transposed matrix, up to the rounding of a 16-term fp32 sum; the operand
    itself stays rotated."""
    x = normal(64, 96)
    plane = encoded(x, Encoding(nvfp4_format(rotation=sign_mask)), COLUMNWISE)
    operand = kernels.decode_operand(plane).double()
    matrix = hadamard.rotation_matrix(sign_mask).double()
    exact = (operand.view(-1, 16) @ matrix.t()).view(96, 64).t()
    decoded = kernels.decode(plane, torch.float32)
    bound = 16 * 2.0**-24 * (operand.abs().view(-1, 16) @ matrix.abs().t()).view(96, 64).t()
    assert ((decoded - exact).abs() <= bound).all()

    rotated = hadamard.rotate(x.t(), sign_mask)
    assert (operand - rotated).norm() / rotated.norm() < 0.11
    assert (decoded - x).norm() / x.norm() < 0.11


def test_a_rotated_operand_is_the_plain_encoding_of_the_rotated_numbers():
    """Rotation happens first, in fp32, then rounding to bf16; amax, scales and codes see only the result."""
    x = normal(64, 96)
    rotated = hadamard.rotate(x.t(), DEFAULT_SIGN_MASK).to(torch.bfloat16)
    plane = encoded(x, Encoding(RHT), COLUMNWISE)
    plain = encoded(rotated, Encoding(nvfp4_format()), ROWWISE)
    assert torch.equal(plane.data, plain.data) and torch.equal(plane.scale, plain.scale)
    assert torch.equal(plane.amax, plain.amax)
    assert plane.amax != x.abs().max()


def test_rotating_both_operands_leaves_their_product_alone():
    dy, x = normal(64, 32, seed=1), normal(64, 48, seed=2)
    rotated = [hadamard.rotate(t.t(), DEFAULT_SIGN_MASK).double() for t in (dy, x)]
    torch.testing.assert_close(rotated[0] @ rotated[1].t(), dy.t().double() @ x.double(), rtol=0, atol=1e-5)


# -- Swizzled scales --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (200, 10), (300, 5)], ids=str)
def test_swizzled_scales_lie_where_the_formula_says(shape):
    rows, blocks = shape
    scales = torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    swizzled = kernels.swizzle_scales(scales)
    block_tiles = -(-blocks // 4)
    assert swizzled.shape == (-(-rows // 128) * 128, block_tiles * 4)
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    place = ((i // 128) * block_tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
    assert torch.equal(swizzled.flatten()[place], scales)
    assert swizzled.count_nonzero() == scales.numel(), "all else is zero"
    assert torch.equal(kernels.unswizzle_scales(swizzled, rows, blocks), scales)


def test_swizzling_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"\[384, 4\], not \[128, 4\]"):
        kernels.unswizzle_scales(torch.zeros(128, 4), 300, 4)
    with pytest.raises(ValueError, match="matrix"):
        kernels.swizzle_scales(torch.zeros(4))


# -- Worked examples of the specification -----------------------------------------------------------


@pytest.mark.parametrize(
    "amax, power_of_two, factor, scale_inv",
    [
        (3.0, False, 149.33333, 0.0066964286),
        (3.0, True, 128.0, 0.0078125),
        (1e-37, False, 3.4028235e38, 2.938736e-39),
        (1e-37, True, 2.0**127, 5.877472e-39),
        (0.0, False, 1.0, 1.0),
        (np.inf, True, 1.0, 1.0),
        (np.nan, True, 1.0, 1.0),
    ],
)
def test_documented_fp32_scales(amax, power_of_two, factor, scale_inv):
    scales = fp32_scales(torch.tensor([amax], dtype=torch.float32), E4M3, power_of_two=power_of_two)
    assert scales.factor.item() == np.float32(factor)
    assert scales.stored.item() == np.float32(scale_inv)


def test_epsilon_is_the_smallest_amax():
    small, large = (fp32_scales(torch.tensor([amax]), E4M3, epsilon=0.5).factor.item() for amax in (0.001, 0.75))
    assert small == 896.0
    assert large == np.float32(448) / np.float32(0.75)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_scale_beyond_fp32_is_the_largest_number_of_the_input_dtype(dtype):
    """448 / 1e-38 is infinite; per-tensor scales take fp32's largest number instead, block scales the input's."""
    x = torch.full((1, 128), 1e-38, dtype=dtype)
    per_tensor = encoded(x, Encoding(fp8_format()), ROWWISE)
    per_block = encoded(x, Encoding(fp8_block_format()), ROWWISE)
    one = np.float32(1)
    assert per_tensor.scale.item() == one / np.float32(torch.finfo(torch.float32).max)
    assert per_block.operand_scales().item() == one / np.float32(torch.finfo(dtype).max)


@pytest.mark.parametrize(
    "element, power_of_two, codes, decoded",
    [
        (E4M3, False, [0x7E, 0xF1, 0x57, 0x44], [3, -0.96428573, 0.10044643, 0.020089285]),
        (E4M3, True, [0x7C, 0xF0, 0x55, 0x42], [3, -1, 0.1015625, 0.01953125]),
        (E5M2, False, [0x7B, 0xF5, 0x67, 0x5E], [3, -1.0714285, 0.09375, 0.020089285]),
    ],
)
def test_documented_per_tensor_example(element, power_of_two, codes, decoded):
    x = torch.tensor([[3, -1, 0.1, 0.02]])
    plane = encoded(x, Encoding(fp8_format(element), power_of_two=power_of_two), ROWWISE)
    assert plane.data.tolist() == [codes]
    np.testing.assert_array_equal(kernels.decode(plane, torch.float32)[0], np.array(decoded, dtype=np.float32))


def test_documented_block_example():
    x = torch.zeros(2, 256)
    x[0, 0], x[0, 200], x[1, 5] = 3.0, -700.0, 0.02
    plane = encoded(x.to(torch.bfloat16), Encoding(fp8_block_format(), power_of_two=True), ROWWISE)
    assert plane.operand_scales().tolist() == [[2**-7, 2], [2**-14, 1]]
    assert plane.scale.tolist() == [[2**-7, 2**-14, 0, 0], [2, 1, 0, 0]]
    assert plane.data[[0, 0, 1], [0, 200, 5]].tolist() == [0x7C, 0xFB, 0x7A]
    assert plane.data.count_nonzero() == 3
    plane = encoded(x, Encoding(fp8_block_format()), ROWWISE)
    expected = np.array([[0.0066964286, 1.5625], [4.4642857e-05, 1]], dtype=np.float32)
    np.testing.assert_array_equal(plane.operand_scales(), expected)


def test_documented_nvfp4_example():
    fmt = nvfp4_format()
    scale = global_scale(torch.tensor([[6.0]]), fmt)
    assert scale.encode.item() == 448.0
    assert scale.decode.item() == np.float32(0.002232143)
    stored, factor = two_level_scales(torch.tensor([[6.0, 0.03]]), scale, fmt.element)
    assert stored.tolist() == [[0x7E, 0x41]]
    np.testing.assert_allclose(factor, [[1.0, 199.1111]], rtol=1e-7, atol=0)

    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6, -1, 0.1, 0.5, 2.5, -3.2, 0, 4.9])
    x[0, 16:20] = torch.tensor([0.01, -0.02, 0.005, 0.03])
    plane = encoded(x, Encoding(fmt), ROWWISE)
    assert plane.amax.tolist() == [6.0]
    assert plane.operand_scales().tolist() == [[0x7E, 0x41]]
    assert codes_of(plane)[0, :8].tolist() == [7, 10, 0, 1, 4, 13, 0, 6]
    assert plane.data[0, :4].tolist() == [0xA7, 0x10, 0xD4, 0x60]
    assert plane.data[0, 8:10].tolist() == [0xE4, 0x72]
    expected = [0.010044643, -0.020089285, 0.005022321, 0.03013393]  # printed with seven digits
    np.testing.assert_allclose(kernels.decode(plane, torch.float32)[0, 16:20], expected, rtol=1e-7, atol=0)
