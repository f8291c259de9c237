"""torch's optimizers on quantized parameters: right through masters, loud without."""

import copy
import sys

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.optim import FusedAdam, FusedSGD, with_masters

from ..common.interrupts import interrupted_at
from ..common.logs import warned
from ..common.optimizer_steps import gradient, quantized_parameter, run_steps, small_model, weight_value
from ..common.quantizers import PAIRS, QUANTIZERS, assert_same_bytes, hybrid_of
from ..common.saved_models import assert_same_contents, contents

RECIPE = recipes.MXFP8BlockScaling()


def fused_adamw(params, **options):
    return with_masters(torch.optim.AdamW, params, fused=True, weight_decay=0.0, **options)


@pytest.mark.parametrize("row, column", PAIRS)
def test_adamw_with_masters_is_fused_adam(row, column):
    torch.manual_seed(0)
    p = quantized_parameter(hybrid_of(row, column))
    run_steps(fused_adamw([p], lr=1e-3), [p])
    torch.manual_seed(0)
    q = quantized_parameter(hybrid_of(row, column))
    run_steps(FusedAdam([q], lr=1e-3, master_weights=True), [q])
    assert_same_bytes(p, q)


@pytest.mark.parametrize(
    "optimizer, options",
    [
        (torch.optim.AdamW, {"lr": 1e-4}),
        (torch.optim.Adam, {"lr": 1e-4, "foreach": False}),
        (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 1e-4}),
        (torch.optim.RMSprop, {"lr": 1e-4}),
    ],
)
def test_any_optimizer_trains_masters_as_it_trains_float32(optimizer, options):
    p, low, exact = (
        quantized_parameter(QUANTIZERS["mxfp8"]()),
        nn.Parameter(weight_value()),
        nn.Parameter(torch.zeros(4)),
    )
    plain = [nn.Parameter(p.dequantize(dtype=torch.float32)), nn.Parameter(low.detach().float())]
    opt = with_masters(optimizer, [p, low, exact], **options)
    assert isinstance(opt, optimizer)
    reference = optimizer(plain, **options)
    for step in range(5):
        p.grad, low.grad = gradient(step), gradient(step)
        plain[0].grad = plain[1].grad = gradient(step).float()
        opt.step()
        reference.step()
    assert opt.param_groups[0]["params"][0] is p
    assert "master_param" not in opt.state[exact]
    assert torch.equal(opt.state[p]["master_param"], plain[0])
    assert torch.equal(opt.state[low]["master_param"], plain[1]) and torch.equal(low, plain[1].bfloat16())
    assert_same_bytes(p, QUANTIZERS["mxfp8"]()(plain[0].detach()))


def test_small_updates_accumulate():
    p = quantized_parameter(QUANTIZERS["mxfp8"](), dtype=torch.float32)
    start = p.dequantize()
    opt = with_masters(torch.optim.SGD, [p], lr=1e-3)
    for _ in range(200):
        p.grad = torch.ones_like(start)
        opt.step()
    assert abs((start - p.dequantize()).mean() - 0.2) < 0.01


def test_masters_start_from_preserved_values():
    model = small_model(RECIPE)
    kept = model[0].weight.get_high_precision_init_val().clone()
    opt = with_masters(torch.optim.AdamW, model.parameters(), lr=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(opt.state[model[0].weight]["master_param"], kept.float())
    assert model[0].weight.get_high_precision_init_val() is None


def test_checkpoints_keep_masters_and_moments_in_float32(tmp_path):
    def made():
        params = [quantized_parameter(hybrid_of("mxfp8", "nvfp4")), nn.Parameter(torch.ones(4))]
        return params, with_masters(torch.optim.AdamW, params, lr=1e-3)

    params, opt = made()
    run_steps(opt, params)
    torch.save(opt.state_dict(), tmp_path / "opt")
    others, again = made()
    for mine, theirs in zip(others, params, strict=True):
        mine.data.copy_(theirs.data)
    again.load_state_dict(torch.load(tmp_path / "opt"))
    assert again.param_groups[0]["params"][0] is others[0]
    for name in ("master_param", "exp_avg", "exp_avg_sq"):
        assert again.state[others[0]][name].dtype == torch.float32
        assert torch.equal(again.state[others[0]][name], opt.state[params[0]][name])
    run_steps(opt, params)
    run_steps(again, others)
    assert_same_bytes(others[0], params[0])
    assert torch.equal(others[1], params[1])


BEGINS_WITH_A_STATE = [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax]


@pytest.mark.parametrize("optimizer", [*BEGINS_WITH_A_STATE, torch.optim.SGD, torch.optim.Adagrad])
def test_a_checkpoint_of_parameters_that_never_had_a_gradient_is_loaded(optimizer):
    """As the experts of a layer that got no tokens: the optimizer has not begun with them, but they have masters."""

    def made(seed):
        params = [quantized_parameter(QUANTIZERS["mxfp8"](), seed + at) for at in range(2)]
        return params, with_masters(optimizer, params, lr=1e-3)

    params, opt = made(0)
    params[0].grad = gradient(0)
    opt.step()
    others, again = made(5)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for mine, theirs in zip(others, params, strict=True):
        assert torch.equal(again.state[mine]["master_param"], opt.state[theirs]["master_param"])
        mine.data.copy_(theirs.data)
    for p, q in zip(params, others, strict=True):
        p.grad, q.grad = gradient(1), gradient(1)
    opt.step()
    again.step()
    for mine, theirs in zip(others, params, strict=True):
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize("before", [0, 2], ids=["new", "used"])
def test_a_state_without_masters_makes_them_from_the_loaded_weights(before):
    """What a run that is abandoned had as masters must not overwrite the weights that are loaded."""
    p = quantized_parameter(QUANTIZERS["mxfp8"]())
    opt = with_masters(torch.optim.AdamW, [p], lr=1e-3)
    run_steps(opt, [p], before)
    plain = nn.Parameter(weight_value(9).float())
    theirs = torch.optim.AdamW([plain], lr=1e-3)
    run_steps(theirs, [plain], 1)
    opt.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        p.copy_(plain)  # after the state of the optimizer, as some frameworks do it
    decoded = p.dequantize(dtype=torch.float32)
    p.grad = torch.zeros_like(p)
    for group in opt.param_groups:
        group["lr"] = 0.0
    opt.step()
    assert torch.equal(opt.state[p]["master_param"], decoded)
    assert torch.equal(p.dequantize(), decoded.to(p.dtype))


def test_a_load_that_fails_leaves_no_masters_behind():
    p = quantized_parameter(QUANTIZERS["mxfp8"]())
    opt = with_masters(torch.optim.AdamW, [p], lr=1e-3)
    with pytest.raises(ValueError, match="parameter group"):
        opt.load_state_dict({"state": {}, "param_groups": []})
    assert "master_param" not in opt.state.get(p, {})


def test_schedulers_hooks_groups_and_frozen_parameters():
    p, frozen, late = (quantized_parameter(QUANTIZERS["mxfp8"](), seed) for seed in range(3))
    frozen.requires_grad_(False)
    opt = with_masters(torch.optim.AdamW, [p, frozen], lr=1.0)
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    opt.add_param_group({"params": [late], "lr": 1e-2})
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.1**step)
    run_steps(opt, [p, late], 1)
    schedule.step()
    assert calls == ["pre", "post"]
    assert opt.param_groups[0]["lr"] == 0.1 and opt.param_groups[1]["params"][0] is late
    assert frozen not in opt.state and "master_param" in opt.state[late]


@pytest.mark.parametrize("make", [lambda p: with_masters(torch.optim.SGD, p, lr=0.1), lambda p: FusedSGD(p, lr=0.1)])
def test_closures_run_on_the_parameters(make):
    p = quantized_parameter(QUANTIZERS["mxfp8"](), dtype=torch.float32)
    target = weight_value(5).float()
    opt = make([p])

    def closure():
        opt.zero_grad()
        loss = (p.dequantize() - target).square().sum()
        loss.backward()
        return loss.detach()

    losses = [float(opt.step(closure)) for _ in range(20)]
    assert losses[-1] < 0.01 * losses[0]


def test_a_failing_step_leaves_the_parameters_in_place():
    p = quantized_parameter(QUANTIZERS["mxfp8"]())
    opt = with_masters(torch.optim.SGD, [p], lr=1e-3)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    assert opt.param_groups[0]["params"][0] is p


# ---- a training loop ---------------------------------------------------------------------------------


def optimizers():
    return {
        "fused_adam": lambda params: FusedAdam(params, lr=1e-2, master_weights=True),
        "fused_sgd": lambda params: FusedSGD(params, lr=1e-2, momentum=0.9),
        "adamw": lambda params: with_masters(torch.optim.AdamW, params, lr=1e-2),
        "adamw_fused": lambda params: with_masters(torch.optim.AdamW, params, lr=1e-2, fused=True),
    }


def backward(model, x, y, scale=1.0):
    with cg.autocast(recipe=RECIPE):
        loss = (model(x) - y).square().mean()
    (loss * scale).backward()
    return float(loss)


@pytest.mark.parametrize("name", optimizers())
def test_gradient_clipping_and_accumulation(name):
    """Two halves, accumulated, are one batch of both; clipping reaches the optimizer."""
    torch.manual_seed(0)
    model = small_model(RECIPE, dtype=torch.float32)
    x, y = torch.randn(64, 64), torch.randn(64, 32)
    opt = optimizers()[name](model.parameters())
    losses = []
    for _ in range(8):
        opt.zero_grad()
        losses.append(sum(backward(model, x[half], y[half], 0.5) for half in (slice(0, 32), slice(32, 64))))
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)) > 1e-2
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        torch.testing.assert_close(norm, torch.tensor(1e-2), rtol=1e-3, atol=0)
        opt.step()
    assert losses[-1] < losses[0]
    assert type(model[0].weight) is cg.MXFP8Tensor


@pytest.mark.parametrize(
    "name, through_step",
    [(name, through) for name in optimizers() for through in (False, True) if name.startswith("fused") or not through],
)
def test_grad_scaler(name, through_step):
    """Scaled gradients give the same step, and one that overflowed is skipped. Only ours take the scaler themselves."""
    torch.manual_seed(0)
    models = [small_model(RECIPE, dtype=torch.float32)]
    models.append(copy.deepcopy(models[0]))
    scaled, plain = (optimizers()[name](model.parameters()) for model in models)
    x, y = torch.randn(32, 64), torch.randn(32, 32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(scale):
        scaled.zero_grad()
        backward(models[0], x, y, scale)
        if through_step:
            scaled.step(grad_scaler=scaler)
        else:
            scaler.step(scaled)
        scaler.update()

    scaler.scale(torch.ones(1))  # which makes the scale
    step(2.0**10)
    backward(models[1], x, y)
    plain.step()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        if isinstance(mine, cg.QuantizedTensor):
            assert_same_bytes(mine, theirs)
        else:
            assert torch.equal(mine, theirs)
    before = models[0][0].weight.detach().clone()
    step(float("inf"))
    assert_same_bytes(models[0][0].weight, before)
    assert scaler.get_scale() == 2.0**9


# ---- without masters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_that_round_away_are_told(options, dtype):
    p = quantized_parameter(QUANTIZERS["mxfp8"](), dtype=dtype)
    p.grad = gradient(0, dtype=dtype)
    with warned("with_masters"):
        torch.optim.AdamW([p], lr=1e-4, weight_decay=0.0, **options).step()


@pytest.mark.usefixtures("silently")
def test_updates_that_are_kept_are_not_complained_about():
    p = quantized_parameter(QUANTIZERS["mxfp8"]())
    p.grad = gradient(0)
    torch.optim.SGD([p], lr=1.0).step()
    with torch.no_grad():
        p.mul_(2.0)
        p.zero_()
        p.copy_(weight_value())
    for name in ("identity", "mxfp4_sr"):  # as in torch; unbiased
        q = quantized_parameter(QUANTIZERS[name]())
        q.grad = gradient(0)
        torch.optim.SGD([q], lr=1e-6).step()
    activation = QUANTIZERS["mxfp8"]()(weight_value())
    activation.add_(1e-6)


def test_a_step_that_is_interrupted_anywhere_can_be_repaired():
    """Also while parameters are put back in place of their masters, and also by going on."""
    params = [quantized_parameter(cg.quantizer_for("mxfp8"), shape=(32, 32)), nn.Parameter(torch.randn(4))]
    optimizer = with_masters(torch.optim.SGD, params, lr=0.1, momentum=0.9)
    run_steps(optimizer, params, 1)
    before = copy.deepcopy((params, optimizer.state_dict()))

    def restore():
        with torch.no_grad():
            for param, value in zip(params, before[0], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(copy.deepcopy(before[1]))

    run_steps(optimizer, params, 1)
    expected, number, hit = contents([params, optimizer]), 0, True
    assert optimizer.param_groups[0]["params"][0] is params[0]
    while hit:
        restore()
        hit = interrupted_at(
            number, sys.modules["crossgrain.optim.with_masters"], lambda: run_steps(optimizer, params, 1)
        )
        assert "master_param" in optimizer.state_dict()["state"][0], f"the master is gone at instruction {number}"
        restore()
        run_steps(optimizer, params, 1)
        assert_same_contents(contents([params, optimizer]), expected)
        number += 7
    assert number > 500, "all of it was counted"
