"""Statistics from parts that can be merged, against torch's own."""

import math

import pytest
import torch

import crossgrain as cg
from crossgrain.compat.debug.stat_names import PLAIN, fp8_stat, tensor_stat
from crossgrain.compat.debug.statistics import (
    merged,
    parts_of_plane,
    parts_of_tensor,
    statistic_of_plane,
    statistic_of_tensor,
)
from crossgrain.planes import COLUMNWISE, ROWWISE

STATS = [tensor_stat(name, "activation") for name in (*PLAIN, "max_blockwise_dynamic_range")]


def values(parts, stats=STATS):
    return {stat.name: statistic_of_tensor(stat).value(parts) for stat in stats}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_of_pieces_are_those_of_the_whole(dtype):
    torch.manual_seed(0)
    whole = (torch.randn(96, 64) * torch.logspace(-3, 3, 64)).to(dtype)
    pieces = [parts_of_tensor(piece, STATS) for piece in whole.split([32, 0 + 64])]
    expected, found = values(parts_of_tensor(whole, STATS)), values(merged(pieces))
    assert found == pytest.approx(expected, rel=1e-12)
    x = whole.double()
    assert expected["std"] == pytest.approx(float(x.std()), rel=1e-12)
    assert expected["mean"] == pytest.approx(float(x.mean()), rel=1e-9)
    assert expected["l2_norm"] == pytest.approx(float(x.norm()), rel=1e-12)


def test_a_mean_far_from_zero_does_not_spoil_the_deviation():
    pieces = [torch.randn(64, 64, dtype=torch.float64) + offset for offset in (1e6, 1e6 + 3, 1e6)]
    stats = [tensor_stat("std", "output")]
    found = values(merged(parts_of_tensor(piece, stats) for piece in pieces), stats)["std"]
    assert found == pytest.approx(float(torch.cat(pieces).std()), rel=1e-9)


def test_zeros_have_no_range_and_one_number_has_no_deviation():
    found = values(parts_of_tensor(torch.zeros(32, 32), STATS))
    assert found["dynamic_range"] == 0 and found[STATS[-1].name] == 0
    assert math.isnan(values(parts_of_tensor(torch.ones(1, 1), STATS))["std"])


def test_nans_stay_in_extremes_of_merged_parts():
    stats = [tensor_stat(name, "output") for name in ("min", "max")]
    pieces = [parts_of_tensor(piece, stats) for piece in (torch.tensor([[1.0, math.nan]]), torch.ones(1, 2))]
    for order in (pieces, pieces[::-1]):
        assert all(math.isnan(value) for value in values(merged(order), stats).values())


def test_partial_blocks_count():
    x = torch.ones(3, 40)
    x[2, 39] = 1 / 64
    stat = tensor_stat("max_blockwise_dynamic_range", "gradient")
    assert values(parts_of_tensor(x, [stat]), [stat])[stat.name] == 6


def test_underflows_under_a_rotation_are_those_of_rotated_numbers():
    """One number among zeros is spread over its whole block: none of the sixteen is lost."""
    x = torch.zeros(32, 16)
    x[::16] = 1.0
    quantizer = cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    plane = quantizer.make_planes(x, rowwise=False, columnwise=True).plane(COLUMNWISE)
    stat = fp8_stat("underflows%_columnwise")
    assert statistic_of_plane(stat).value(parts_of_plane(x, plane, [stat])) == 0


def test_padding_has_no_part_in_the_errors_of_a_plane():
    torch.manual_seed(0)
    x = torch.randn(40, 48)
    plane = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)(torch.nn.functional.pad(x, (0, 16, 0, 24))).plane(ROWWISE)
    decoded = cg.kernels.decode(plane, torch.float32)[:40, :48]
    stats = [fp8_stat(name) for name in ("mse", "underflows%", "scale_inv_min", "scale_inv_max")]
    parts = merged([parts_of_plane(x, plane, stats), parts_of_plane(x, plane, stats)])
    found = {stat.kind: statistic_of_plane(stat).value(parts) for stat in stats}
    assert found["mse"] == pytest.approx(float((decoded - x).double().square().mean()), rel=1e-6)
    assert found["underflows%"] == 100 * int((decoded == 0).sum()) / x.numel()
    assert found["scale_inv_max"] == float(torch.exp2(plane.operand_scales().float() - 127).max())
