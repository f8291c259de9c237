"""Updates of quantized parameters that rounding loses are warned about, whatever alias they are made through."""

import pytest
import torch

import crossgrain as cg

from ..common.logs import silent, warned


def parameter():
    torch.manual_seed(0)
    return torch.nn.Parameter(cg.quantize(torch.randn(32, 64), "mxfp8"))


ALIASES = {
    "parameter": lambda weight: weight,
    "data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach(),
    "view of data": lambda weight: weight.data.view(2, 16, 64),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_a_lost_update_is_warned_about(alias):
    weight = parameter()
    with (
        torch.no_grad(),
        warned("left 100% of a MXFP8Tensor parameter .* Keep float32 masters"),
    ):
        ALIASES[alias](weight).add_(1e-6)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_update_that_arrives_is_not(alias):
    weight = parameter()
    with torch.no_grad(), silent():
        ALIASES[alias](weight).add_(1.0)


def test_tensors_that_are_no_parameters_are_not_watched():
    q = cg.quantize(torch.randn(32, 64), "mxfp8")
    with silent():
        q.detach().add_(1e-6)
