"""Bias apart from variance: seeded draws, against the same draws in float64."""

import pytest
import torch

import crossgrain as cg
from crossgrain.lab.inspect.draws import bias_and_noise
from crossgrain.lab.inspect.encode import encoded, measured
from crossgrain.lab.inspect.statistics import operand_of
from crossgrain.planes import COLUMNWISE, ROWWISE


def split(x, encoding, direction, draws, given=None):
    given = measured(x, encoding, direction) if given is None else given
    operand = operand_of(x, encoding.format, direction, x[x.isfinite()].abs().max().item())
    return bias_and_noise(operand, x, encoding, direction, given, draws)


@pytest.mark.parametrize("scale", [1.0, 2.0**-60])
@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
def test_it_is_the_mean_and_the_spread_of_the_draws(direction, scale):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * scale
    x[5, 5] *= 50
    encoding = cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True).encoding(direction)
    draws = 5
    found = split(x, encoding, direction, draws)
    given = measured(x, encoding, direction)
    decoded = torch.stack(
        [
            cg.kernels.decode(encoded(x, encoding, direction, given, seed), torch.float32).double()
            for seed in range(draws)
        ]
    )
    power = x.double().square().sum()
    variance = decoded.var(0).sum()
    squared_bias = (decoded.mean(0) - x.double()).square().sum() - variance / draws
    # A rotated plane is decoded with the rounding of fp32, which is not done here.
    assert found.noise == pytest.approx((variance / power).sqrt().item(), rel=1e-6)
    assert found.bias == pytest.approx((squared_bias / power).clamp(min=0).sqrt().item(), rel=1e-4)


def test_stochastic_rounding_has_little_bias_and_rounding_to_nearest_is_all_bias():
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    encoding = cg.NVFP4Quantizer(stochastic_rounding=True).encoding(ROWWISE)
    found = split(x, encoding, ROWWISE, 16)
    assert found.noise > 0.1 and found.bias < found.noise / 5


def test_a_cut_is_a_bias_that_draws_do_not_average_out():
    x = torch.full((16, 16), 1.0)
    x[0, 0] = 100.0
    encoding = cg.NVFP4Quantizer(stochastic_rounding=True).encoding(ROWWISE)
    from crossgrain.lab.inspect.encode import Given

    found = split(x, encoding, ROWWISE, 8, Given(torch.tensor([10.0])))  # an amax that is much too small
    assert found.bias > 0.5


def test_nans_have_no_part_in_it():
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    encoding = cg.NVFP4Quantizer(stochastic_rounding=True).encoding(ROWWISE)
    x[3, 3] = float("nan")
    found = split(x, encoding, ROWWISE, 4)
    assert 0 < found.noise < 1 and found.bias < 1


def test_zeros_have_neither():
    encoding = cg.NVFP4Quantizer(stochastic_rounding=True).encoding(ROWWISE)
    x = torch.zeros(16, 16)
    found = bias_and_noise(
        operand_of(x, encoding.format, ROWWISE, 0.0), x, encoding, ROWWISE, measured(x, encoding, ROWWISE), 4
    )
    assert (found.bias, found.noise) == (None, 0.0)


def test_torchs_generator_does_not_move():
    x = torch.randn(32, 32)
    encoding = cg.NVFP4Quantizer(stochastic_rounding=True).encoding(ROWWISE)
    before = torch.get_rng_state()
    split(x, encoding, ROWWISE, 4)
    assert torch.equal(torch.get_rng_state(), before)
