"""FusedSGD: torch's numbers on plain parameters, masters on quantized ones."""

import copy

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.optim import FusedSGD

from ..common.optimizer_steps import quantized_parameter, run_steps, weight_value
from ..common.quantizers import assert_same_bytes, hybrid_of

OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_plain_parameters_are_bitwise_those_of_torch(options):
    params = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3))]
    expected = copy.deepcopy(params)
    run_steps(torch.optim.SGD(expected, lr=0.1, **options, fused=True), expected, 20)
    run_steps(FusedSGD(params, lr=0.1, **options), params, 20)
    for mine, theirs in zip(params, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_weight_decay_after_momentum():
    p = nn.Parameter(torch.ones(4))
    opt = FusedSGD([p], lr=0.1, momentum=0.9, weight_decay=0.5, wd_after_momentum=True)
    p.grad = torch.full((4,), 2.0)
    opt.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), 1.0 - 0.1 * 0.5 - 0.1 * 2.0))
    assert torch.equal(opt.state[p]["momentum_buffer"], p.grad), "the decay is not in the momentum"


@pytest.mark.parametrize("options", OPTIONS)
def test_quantized_parameters_follow_their_masters(options):
    p, plain = quantized_parameter(hybrid_of("mxfp8", "nvfp4")), nn.Parameter(weight_value())
    with torch.no_grad():
        plain.copy_(p.dequantize())
    opt = FusedSGD([p], lr=1e-3, **options)
    with_masters = FusedSGD([plain], lr=1e-3, master_weights=True, **options)
    run_steps(opt, [p], 20)
    run_steps(with_masters, [plain], 20)
    master = opt.state[p]["master_param"]
    assert torch.equal(master, with_masters.state[plain]["master_param"])
    assert torch.equal(plain, master.bfloat16())
    expected = quantized_parameter(hybrid_of("mxfp8", "nvfp4"))
    expected.data.quantize_(master)
    assert_same_bytes(p, expected)


def test_groups_may_differ_in_momentum_and_checkpoints_keep_it():
    def made():
        params = [quantized_parameter(hybrid_of("mxfp8", "mxfp8")), nn.Parameter(torch.ones(4))]
        groups = [{"params": params[:1], "momentum": 0.9}, {"params": params[1:]}]
        return params, FusedSGD(groups, lr=0.1)

    params, opt = made()
    run_steps(opt, params)
    assert "momentum_buffer" not in opt.state[params[1]]
    others, again = made()
    for mine, theirs in zip(others, params, strict=True):
        mine.data.copy_(theirs.data)
    again.load_state_dict(opt.state_dict())
    run_steps(opt, params)
    run_steps(again, others)
    assert_same_bytes(others[0], params[0])
    assert torch.equal(others[1], params[1])
    assert type(others[0]) is cg.HybridQuantizedTensor


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="Nesterov momentum needs momentum > 0"):
        FusedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, nesterov=True)
