"""Planes at the edges, continued: rotation, layouts and worked examples of the specification."""

import dataclasses

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import (
    DEFAULT_SIGN_MASK,
    E4M3,
    E5M2,
    IDENTITY,
    fp8_block_format,
    fp8_format,
    get_format,
    nvfp4_format,
)
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Target
from crossgrain.kernels.reference import hadamard
from crossgrain.kernels.reference.scaling import fp32_scales, global_scale, two_level_scales
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction, Plane, empty_plane

from ..common.golden_cases import encoded
from ..common.planes import (
    BOTH_DIRECTIONS,
    CPU,
    EVERY_UNROTATED_FORMAT,
    QUANTIZED,
    RHT,
    assert_same_plane,
    codes_of,
    normal,
)


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
    with pytest.raises(ValueError, match=r"\[384, 4\], got \[128, 4\]"):
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
    stored, factor = two_level_scales(torch.tensor([[6.0, 0.03]]), scale, fmt)
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
