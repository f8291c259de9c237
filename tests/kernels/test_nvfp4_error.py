"""The quantization error of NVFP4 on normally distributed numbers: one figure that an implementation must reproduce."""

import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.planes import COLUMNWISE, ROWWISE

from ..common.golden_cases import encoded

ENCODINGS = {
    "nearest 1x16": (Encoding(nvfp4_format()), 9.0e-3),
    "4over6 1x16": (Encoding(nvfp4_format(scale_bound=256), four_over_six="MSE"), 7.6e-3),
    "nearest 16x16": (Encoding(nvfp4_format(two_d=True)), 12.4e-3),
}


@pytest.fixture(scope="module")
def normal():
    """Two million numbers: between seeds the errors vary by about 0.1 %."""
    return torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))


def mean_squared_error(x, encoding, direction=ROWWISE, seed=None):
    decoded = kernels.decode(encoded(x, encoding, direction, seed=seed), torch.float32)
    return (decoded - x).double().square().mean().item()


@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=lambda direction: direction.value)
@pytest.mark.parametrize("encoding, expected", ENCODINGS.values(), ids=ENCODINGS)
def test_mean_squared_error(normal, encoding, expected, direction):
    assert mean_squared_error(normal, encoding, direction) == pytest.approx(expected, rel=0.01)


def test_the_better_of_two_scales_is_better_in_its_own_measure(normal):
    x = normal[:512]

    def errors(four_over_six):
        decoded = kernels.decode(
            encoded(x, Encoding(nvfp4_format(scale_bound=256), four_over_six=four_over_six), ROWWISE), torch.float32
        )
        difference = (decoded - x).double()
        return difference.abs().mean().item(), difference.square().mean().item()

    (plain_mae, plain_mse), (mae_mae, mae_mse), (mse_mae, mse_mse) = errors(None), errors("MAE"), errors("MSE")
    assert mae_mae < mse_mae < plain_mae
    assert mse_mse < mae_mse < plain_mse


def test_a_rotated_plane_decodes_about_as_well_as_a_plain_one(normal):
    """The rotation of normal numbers is normal again, and un-rotating does not amplify errors."""
    rotated = mean_squared_error(normal[:512], Encoding(nvfp4_format(rotation=0xD7E8)), COLUMNWISE)
    assert rotated == pytest.approx(9.0e-3, rel=0.02)


def test_stochastic_rounding_costs_about_twice_the_error(normal):
    """Unbiased has its price: a uniform place within a step costs step²/6 instead of step²/12."""
    stochastic = mean_squared_error(normal, Encoding(nvfp4_format(), stochastic=True), seed=0)
    assert stochastic == pytest.approx(2 * 9.0e-3, rel=0.1)
