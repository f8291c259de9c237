"""Optimizers keep all their options and states in copies, pickles and state dicts: they go on bit for bit."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.optim import FusedAdam, FusedSGD, with_masters

from ..common.quantizers import buffers_of

MASTERS = {"lr": 0.1, "master_weights": True}
OPTIMIZERS = {
    "adam": lambda p: FusedAdam(p, **MASTERS, adam_w_mode=False, weight_decay=0.1),
    "adam_float16": lambda p: FusedAdam(p, **MASTERS, exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16),
    "adam_fp8": lambda p: FusedAdam(p, **MASTERS, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8),
    "adam_float16_masters": lambda p: FusedAdam(p, **MASTERS, master_weight_dtype=torch.float16),
    "adam_remainders": lambda p: FusedAdam(p, **MASTERS, store_param_remainders=True, capturable=True),
    "sgd": lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True, master_weights=True),
    "masters_of_adamw": lambda p: with_masters(torch.optim.AdamW, p, lr=0.1),
}


def new_params():
    torch.manual_seed(3)
    return [
        nn.Parameter(torch.randn(4, 4)),
        nn.Parameter(torch.randn(3, 3).bfloat16()),
        nn.Parameter(cg.quantize(torch.randn(32, 32), "mxfp8")),
    ]


def step(opt, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params_of(opt):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    opt.step()


def params_of(opt):
    return [param for group in opt.param_groups for param in group["params"]]


def everything(opt):
    """Bytes of parameters and states."""
    params = params_of(opt)
    states = [value for param in params for value in opt.state[param].values()]
    found = []
    for value in [*params, *states]:
        found.extend(buffers_of(value).values() if isinstance(value, cg.QuantizedTensor) else [value])
    return [torch.as_tensor(value).detach().clone() for value in found]


def through_pickle(opt):
    return pickle.loads(pickle.dumps(opt))


def through_state_dict(opt, make):
    params = copy.deepcopy(params_of(opt))
    other, file = make(params), io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_what_goes_on_elsewhere_is_the_same_training(name, way):
    opt = OPTIMIZERS[name](new_params())
    for seed in range(3):
        step(opt, seed)
    copies = {"deepcopy": copy.deepcopy, "pickle": through_pickle}
    twin = through_state_dict(opt, OPTIMIZERS[name]) if way == "state_dict" else copies[way](opt)
    assert type(twin) is type(opt)
    assert all(mine is not theirs for mine, theirs in zip(params_of(opt), params_of(twin), strict=True))
    for seed in range(3, 6):
        assert all(map(torch.equal, everything(opt), everything(twin)))
        step(opt, seed)
        assert not all(map(torch.equal, everything(opt), everything(twin))), "they share no memory"
        step(twin, seed)
    assert all(map(torch.equal, everything(opt), everything(twin)))


def test_fp8_states_of_any_magnitude_come_back_bit_for_bit():
    """The numbers alone would give another scale, by its last bit, for one tensor in fourteen."""
    for seed in range(40):
        p = nn.Parameter(torch.zeros(8))
        opt = FusedAdam([p], exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8)
        p.grad = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        opt.step()
        twin = through_state_dict(opt, lambda p: FusedAdam(p, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8))
        assert all(map(torch.equal, everything(opt), everything(twin)))


def test_a_scheduler_is_not_copied_along():
    opt = FusedAdam([nn.Parameter(torch.zeros(2))])
    torch.optim.lr_scheduler.StepLR(opt, 1)
    assert "step" not in vars(through_pickle(opt))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_another_shape_are_not_spread_out(name):
    """[4, 1] could be copied to [4, 4]."""
    dicts = []
    for width in (1, 4):
        weight = nn.Parameter(torch.ones(4, width, dtype=torch.bfloat16))
        optimizer = OPTIMIZERS[name]([weight])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        dicts.append(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"parameter 0 has shape \[4, 1\], but the parameter has \[4, 4\]"):
        optimizer.load_state_dict(dicts[0])
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, value in before["state"][0].items():
        assert torch.equal(torch.as_tensor(after["state"][0][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_never_had_a_gradient(name):
    opt = OPTIMIZERS[name](new_params())
    params_of(opt)[0].grad = torch.ones(4, 4)
    opt.step()
    copied = copy.deepcopy(opt)
    for each in (opt, copied):
        step(each, 1)
    assert all(map(torch.equal, everything(opt), everything(copied)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_without_masters_takes_none_from_weights_that_are_loaded_after_it(name):
    source = OPTIMIZERS[name](new_params())
    step(source, 0)
    state = source.state_dict()
    for each in state["state"].values():
        each.pop("master_param", None)
    early, late = (OPTIMIZERS[name](new_params()) for _ in range(2))
    step(early, 1)  # so that it has masters of its own
    early.load_state_dict(copy.deepcopy(state))
    with torch.no_grad():
        for opt in (early, late):
            for param, value in zip(params_of(opt), params_of(source), strict=True):
                param.copy_(value)
    late.load_state_dict(copy.deepcopy(state))
    for opt in (early, late):
        step(opt, 2)
    assert all(map(torch.equal, everything(early), everything(late)))
