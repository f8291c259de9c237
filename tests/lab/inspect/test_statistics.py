"""Every statistic equals a plain computation in float64, on tensors with planted outliers, underflow and saturation."""

import math

import pytest
import torch

import crossgrain as cg
from crossgrain.formats.encoding import Encoding
from crossgrain.lab.inspect.statistics import operand_of, plane_statistics, tensor_statistics
from crossgrain.planes import COLUMNWISE, ROWWISE

ROWS, COLUMNS = 128, 96


def planted(scale=1.0):
    """Normal numbers with two outliers, a row of zeros, and one stretch of numbers that are far below the rest."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    x[3, 7], x[70, 40] = 300.0, -150.0
    x[17] = 0.0
    x[40:72, 64:80] *= 1e-6
    x[40, 64] = x[64, 64] = 2.0
    return x * scale


def float64_view(x, direction):
    return (x if direction is ROWWISE else x.t()).double()


def tiles(matrix, rows, length):
    """Blocks as [number of blocks, numbers], in the order of rows of blocks; sizes are multiples."""
    r, c = matrix.shape
    return matrix.reshape(r // rows, rows, c // length, length).transpose(1, 2).reshape(-1, rows * length)


def scales_of(q, name, direction):
    """Scales of the blocks of a tensor, from the bytes, in the order of `tiles`."""
    plane = q.plane(direction)
    stored = plane.operand_scales()
    if "2d" in name:  # a row of scales for each row of a tile
        stored = stored[:: 16 if name.startswith("nvfp4") else 32]
    if name.startswith("mx"):
        return torch.exp2(stored.double() - 127).reshape(-1)
    if name.startswith("nvfp4"):
        bytes_ = stored.contiguous().view(torch.float8_e4m3fn).double()
        return (bytes_ * plane.amax.double() / (6 * 448)).reshape(-1)
    return stored.double().reshape(-1)


LARGEST = {"mxfp8": (448, 16), "nvfp4": (6, 1), "fp8_block": (448, 16), "mxfp4": (6, 1), "fp8": (448, 16)}
CASES = [
    ("mxfp8", (1, 32), "mxfp8"),
    ("mxfp8_2d", (32, 32), "mxfp8"),
    ("mxfp4", (1, 32), "mxfp4"),
    ("nvfp4", (1, 16), "nvfp4"),
    ("nvfp4_2d", (16, 16), "nvfp4"),
    ("fp8", None, "fp8"),
]


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**50])
@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
@pytest.mark.parametrize("name, block, family", CASES)
def test_statistics_of_a_plane(name, block, family, direction, scale):
    x = planted(scale)
    q = cg.quantize(x, name)
    plane = q.plane(direction)
    encoding = Encoding(plane.format)
    found = plane_statistics(operand_of(x, plane.format, direction, x.abs().max().item()), plane, encoding)

    exact = float64_view(x, direction)
    decoded = float64_view(q.dequantize(direction=direction), direction)
    error = decoded - exact
    relative = (error.square().sum() / exact.square().sum()).sqrt().item()
    assert found.relative_error == pytest.approx(relative, rel=1e-6)
    assert found.snr_db == pytest.approx(-20 * math.log10(relative), rel=1e-6)
    assert found.shrinkage == pytest.approx(1 - ((decoded * exact).sum() / exact.square().sum()).item(), rel=1e-6)

    underflow = ((decoded == 0) & (exact != 0)).sum() / (exact != 0).sum()
    assert found.underflow == pytest.approx(underflow.item(), rel=1e-6)
    assert underflow > 0 or family not in ("nvfp4", "mxfp4")

    rows, length = block or (1, 32)
    powers, noises = (tiles(part.square(), rows, length).sum(1) for part in (exact, error))
    there = powers > 0
    errors = (noises[there] / powers[there]).sqrt().sort().values
    for share, key in ((0.5, "50%"), (0.9, "90%"), (0.99, "99%"), (1.0, "max")):
        at = math.ceil(share * len(errors)) - 1
        assert found.block_error[key] == pytest.approx(errors[at].item(), rel=1e-6)

    largest, half_step = LARGEST[family]
    scales = scales_of(q, name, direction)
    limits = torch.where(scales > 0, (largest + half_step) * scales, math.inf)  # without a scale it is underflow
    cut = tiles(exact.abs(), rows, length) > limits[:, None] if block else exact.abs() > limits
    assert found.saturation == pytest.approx(cut.double().mean().item(), rel=1e-6)
    assert (found.saturation > 0) == (family == "mxfp4")  # the OCP rule cuts off amaxes between 7/8 and 1 of a binade

    if block:
        scales = scales[there]
    assert found.zero_scales == pytest.approx((scales == 0).double().mean().item(), rel=1e-6)
    exponents = scales[scales > 0].log2().floor().long().tolist()
    assert (found.scale_log2_min, found.scale_log2_max) == (min(exponents), max(exponents))
    assert found.scale_histogram == {e: exponents.count(e) for e in set(exponents)}
    assert found.nonfinite == 0


@pytest.mark.parametrize("stochastic", [False, True])
def test_errors_of_a_rotated_plane_are_those_after_the_rotation_is_undone(stochastic):
    x = planted()
    quantizer = cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=stochastic)
    plane = quantizer.make_planes(x, rowwise=False, columnwise=True).plane(COLUMNWISE)
    found = plane_statistics(operand_of(x, plane.format, COLUMNWISE, 300.0), plane, quantizer.encoding(COLUMNWISE))
    exact, decoded = x.t().double(), cg.kernels.decode(plane, torch.float32).t().double()
    relative = ((decoded - exact).square().sum() / exact.square().sum()).sqrt().item()
    # Up to the rounding of the rotation, which is done and undone in fp32.
    assert found.relative_error == pytest.approx(relative, rel=1e-6)
    errors = (tiles((decoded - exact).square(), 1, 16).sum(1) / tiles(exact.square(), 1, 16).sum(1)).sqrt()
    assert found.block_error["max"] == pytest.approx(errors.nan_to_num().max().item(), rel=1e-5)

    # Underflow and saturation are those of the rotated numbers, which the codes are for.
    rotated = (tiles(exact, 1, 16).float() @ quantizer.rht_matrix).bfloat16().double()
    stored = tiles(cg.kernels.decode_operand(plane).double(), 1, 16)
    lost = ((stored == 0) & (rotated != 0)).sum() / (rotated != 0).sum()
    assert found.underflow == pytest.approx(lost.item(), rel=1e-6)
    scales = plane.operand_scales().contiguous().view(torch.float8_e4m3fn).double() * plane.amax.double() / (6 * 448)
    limits = torch.where(scales > 0, scales * (6 if stochastic else 7) * (1 + 2**-20), math.inf)
    beyond = rotated.abs() > limits.reshape(-1, 1)
    assert found.saturation == pytest.approx(beyond.double().mean().item(), rel=1e-6)
    assert (found.saturation > 0) is stochastic  # scales that were rounded down cut off what could be rounded up


def test_a_scale_that_expected_smaller_numbers_saturates():
    x = planted()
    quantizer = cg.Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), cg.DType.kFloat8E4M3)
    plane = quantizer.make_planes(x, rowwise=True, columnwise=False).plane(ROWWISE)
    found = plane_statistics(operand_of(x, plane.format, ROWWISE, 300.0), plane, quantizer.encoding(ROWWISE))
    assert found.saturation == 2 / x.numel()  # beyond 464 / 16 = 29
    x[0, 0], x[0, 1] = 28.5, 29.5  # one is nearest to the largest number, 28, the other is cut off
    plane = quantizer.make_planes(x, rowwise=True, columnwise=False).plane(ROWWISE)
    found = plane_statistics(operand_of(x, plane.format, ROWWISE, 300.0), plane, quantizer.encoding(ROWWISE))
    assert found.saturation == 3 / x.numel()
    assert found.scale_histogram == {-4: 1}


def test_blocks_whose_scale_underflows_are_lost():
    x = planted()
    x[40:72, 64:80] = 1.0
    x[:, 80:] = 1e-9  # its block scale is below the smallest E4M3 number under the amax of 300
    plane = cg.quantize(x, "nvfp4").plane(ROWWISE)
    found = plane_statistics(operand_of(x, plane.format, ROWWISE, 300.0), plane, Encoding(plane.format))
    assert found.zero_scales == 128 / (128 * 6 - 5)  # but the five other blocks of the row of zeros
    assert found.block_error["max"] == 1.0
    assert found.underflow > 1 / 6 and found.saturation == 0


def test_nans_and_infinities_are_counted_and_have_no_part_in_the_errors():
    x = planted()
    x[5, 5], x[6, 6], x[7, 7] = math.nan, math.inf, -math.inf
    of_tensor = tensor_statistics(x)
    assert (of_tensor.nan, of_tensor.inf, of_tensor.amax) == (1, 2, 300.0)
    plane = cg.quantize(x, "mxfp8").plane(ROWWISE)
    found = plane_statistics(operand_of(x, plane.format, ROWWISE, 300.0), plane, Encoding(plane.format))
    decoded = cg.kernels.decode(plane, torch.float32).double()
    valid = (decoded - x.double()).isfinite()
    error, exact = (torch.where(valid, part, 0.0) for part in (decoded - x.double(), x.double()))
    assert found.relative_error == pytest.approx((error.norm() / exact.norm()).item(), rel=1e-6)
    assert found.nonfinite == (~decoded.isfinite()).double().mean().item() > 0
    assert found.saturation == 0


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**50])
def test_statistics_of_a_tensor(scale):
    x = planted(scale)
    x[:, 90:] = 0.0
    found = tensor_statistics(x)
    kept = torch.cat([x[:17], x[18:]])[:, :90].double()
    assert found.amax == x.abs().max().item()
    assert found.rms == pytest.approx(kept.square().mean().sqrt().item(), rel=1e-6)
    kurtosis = kept.pow(4).mean() / kept.square().mean().square()
    assert found.kurtosis == pytest.approx(kurtosis.item(), rel=1e-6)
    assert (found.zero_rows, found.zero_columns, found.nan, found.inf) == (1, 6, 0, 0)


def test_zeros_have_no_errors():
    x = torch.zeros(32, 32)
    plane = cg.quantize(x, "nvfp4").plane(COLUMNWISE)
    found = plane_statistics(operand_of(x, plane.format, COLUMNWISE, 0.0), plane, Encoding(plane.format))
    assert (found.relative_error, found.snr_db, found.underflow, found.saturation) == (None, None, 0.0, 0.0)
    assert found.block_error == {} and found.scale_histogram == {}
    assert tensor_statistics(x).kurtosis is None
