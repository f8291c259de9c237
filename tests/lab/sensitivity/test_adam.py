"""How optimizers weigh gradients."""

import pytest
import torch

import crossgrain as cg
from crossgrain.lab.sensitivity.adam import GradientWeights


def stepped(make):
    parameter = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = make([parameter])
    for _ in range(3):
        parameter.grad = torch.randn(4, 6)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, cg.optim.FusedAdam])
def test_the_root_is_what_adam_divides_by(make):
    parameter, optimizer = stepped(lambda parameters: make(parameters, lr=0.0, betas=(0.0, 0.9), weight_decay=0.0))
    weights = GradientWeights(optimizer, [parameter])
    assert weights.note == ""
    root, moment = weights.root(parameter), optimizer.state[parameter]["exp_avg_sq"].clone()
    # With these options a step is lr · g / (root²): measured on a step itself.
    before = parameter.detach().clone()
    optimizer.param_groups[0]["lr"] = 1.0
    gradient = torch.zeros(4, 6)  # the second moment only shrinks by 0.9, and its correction is known
    parameter.grad = gradient + 1e-12
    optimizer.step()
    expected = 1e-12 / ((0.9 * moment / (1 - 0.9**4)).sqrt() + 1e-8)
    assert torch.allclose(before - parameter.detach(), expected, rtol=1e-2, atol=1e-6)
    assert torch.allclose(root**2, (moment / (1 - 0.9**3)).sqrt() + 1e-8, rtol=1e-6)


def test_the_state_of_the_optimizer_is_not_changed():
    parameter, optimizer = stepped(lambda parameters: torch.optim.RMSprop(parameters, lr=0.1))
    before = optimizer.state[parameter]["square_avg"].clone()
    root = GradientWeights(optimizer, [parameter]).root(parameter)
    assert torch.equal(optimizer.state[parameter]["square_avg"], before)
    assert torch.allclose(root**4, before, rtol=1e-3, atol=1e-6)


def test_without_second_moments_all_numbers_weigh_alike_and_it_is_said():
    parameter = torch.nn.Parameter(torch.randn(3))
    for optimizer in (None, torch.optim.SGD([parameter], lr=0.1), torch.optim.Adam([parameter])):
        weights = GradientWeights(optimizer, [parameter])
        assert weights.is_plain and weights.note.endswith("alike")
        assert float(weights.root(parameter)) == 1


def test_parameters_without_moments_are_left_out_and_counted():
    parameter, optimizer = stepped(torch.optim.Adam)
    other = torch.nn.Parameter(torch.randn(3))
    weights = GradientWeights(optimizer, [parameter, other])
    assert "1 of 2 parameters" in weights.note
    assert weights.root(other) is None and weights.root(parameter) is not None
