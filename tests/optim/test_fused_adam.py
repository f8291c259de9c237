"""FusedAdam: torch's numbers on plain parameters, masters and whole refreshes on quantized ones."""

import copy

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.optim import FusedAdam, FusedSGD
from crossgrain.optim.masters import join_master, split_master
from crossgrain.quantizers import hybrid, writing

from ..common.logs import warned
from ..common.optimizer_steps import gradient, quantized_parameter, run_steps, small_model, weight_value
from ..common.quantizers import PAIRS, QUANTIZERS, assert_same_bytes, hybrid_of


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_plain_parameters_are_bitwise_those_of_torch(adam_w_mode, weight_decay):
    params = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(()))]
    expected = copy.deepcopy(params)
    torch_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    run_steps(torch_class(expected, lr=1e-2, weight_decay=weight_decay, fused=True), expected, 20)
    run_steps(FusedAdam(params, lr=1e-2, weight_decay=weight_decay, adam_w_mode=adam_w_mode), params, 20)
    for mine, theirs in zip(params, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedSGD])
def test_autograd_notices_that_a_step_has_changed_plain_parameters(optimizer):
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    loss = (p * torch.ones(4, requires_grad=True)).sum()
    optimizer([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_bias_correction():
    p, g = nn.Parameter(torch.randn(64)), torch.randn(64)
    start = p.detach().clone()
    p.grad = g
    FusedAdam([p], lr=1e-2, bias_correction=False).step()
    expected = start - 1e-2 * (0.1 * g) / ((0.001 * g * g).sqrt() + 1e-8)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
@pytest.mark.parametrize("capturable", [False, True])
def test_step_counts_and_learning_rates_may_be_tensors(lr, capturable):
    p = nn.Parameter(torch.ones(8))
    q = nn.Parameter(torch.ones(8))
    opt = FusedAdam([p], lr=lr, capturable=capturable)
    run_steps(opt, [p])
    run_steps(FusedAdam([q], lr=1e-2), [q])
    assert int(opt.param_groups[0]["step"]) == 3
    assert isinstance(opt.param_groups[0]["step"], torch.Tensor) is capturable
    assert torch.equal(p, q)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_hybrid_of_a_format_with_itself_trains_bitwise_like_the_format(name):
    torch.manual_seed(0)
    plain = quantized_parameter(QUANTIZERS[name]())
    opt = FusedAdam([plain], lr=1e-2, weight_decay=0.1, master_weights=True)
    run_steps(opt, [plain], 20)

    torch.manual_seed(0)
    hybrid = quantized_parameter(hybrid_of(name, name))
    hybrid_opt = FusedAdam([hybrid], lr=1e-2, weight_decay=0.1, master_weights=True)
    run_steps(hybrid_opt, [hybrid], 20)

    for direction in cg.Direction:
        mine, theirs = hybrid.plane(direction), plain.plane(direction)
        assert torch.equal(mine.data.flatten(), theirs.data.flatten())
        assert mine.scale is None or torch.equal(mine.operand_scales(), theirs.operand_scales())
    for key in ("exp_avg", "exp_avg_sq", "master_param"):
        mine = hybrid_opt.state[hybrid][key]
        assert mine.dtype == torch.float32 and type(mine) is torch.Tensor
        assert torch.equal(mine, opt.state[plain][key])


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("row, column", PAIRS)
def test_every_plane_is_written_from_the_master(row, column, source, monkeypatch):
    for module in (writing, hybrid):  # stochastic rounding draws the same every time
        monkeypatch.setattr(module, "draw_seed", lambda subject="": 7)
    p = quantized_parameter(hybrid_of(row, column, source))
    identity, buffers = id(p), [buffer.data_ptr() for _, buffer in p._buffers()]
    opt = FusedAdam([p], lr=1e-2, master_weights=True)
    run_steps(opt, [p])
    assert type(p) is cg.HybridQuantizedTensor and isinstance(p, nn.Parameter) and id(p) == identity
    assert [buffer.data_ptr() for _, buffer in p._buffers()] == buffers
    expected = quantized_parameter(hybrid_of(row, column, source))
    expected.data.quantize_(opt.state[p]["master_param"])
    assert_same_bytes(p, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_moments_are_stored_as_promised(dtype):
    p = quantized_parameter(QUANTIZERS["mxfp8"]())
    exact = quantized_parameter(QUANTIZERS["mxfp8"]())
    opt = FusedAdam([p], lr=1e-3, master_weights=True, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    reference = FusedAdam([exact], lr=1e-3, master_weights=True)
    run_steps(opt, [p])
    run_steps(reference, [exact])
    for name in ("exp_avg", "exp_avg_sq"):
        stored = opt.state[p][name]
        if dtype == torch.uint8:
            assert isinstance(stored, cg.Float8Tensor) and stored._data.dtype == torch.uint8
        else:
            assert stored.dtype == dtype
        unscaled = opt.get_unscaled_state(p, name)
        assert unscaled.dtype == torch.float32 and unscaled.shape == p.shape
        error = (unscaled - reference.get_unscaled_state(exact, name)).abs().max()
        largest = reference.get_unscaled_state(exact, name).abs().max()
        assert error <= {torch.float32: 0, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.uint8: 0.1}[dtype] * largest


def test_float16_states_reach_beyond_the_range_of_float16():
    p = nn.Parameter(torch.zeros(4))
    opt = FusedAdam([p], exp_avg_sq_dtype=torch.float16)
    for value in (torch.full((4,), 1e9), torch.full((4,), 1e-9), torch.zeros(4)):
        opt.set_scaled_state(p, "exp_avg_sq", value)
        torch.testing.assert_close(opt.get_unscaled_state(p, "exp_avg_sq"), value, rtol=1e-3, atol=0)


def test_masters_in_float16():
    p = quantized_parameter(QUANTIZERS["mxfp8"]())
    opt = FusedAdam([p], lr=1e-3, master_weights=True, master_weight_dtype=torch.float16)
    run_steps(opt, [p])
    assert opt.state[p]["master_param"].dtype == torch.float16
    assert not torch.equal(p.dequantize(), weight_value())


@pytest.mark.parametrize("recipe", [recipes.MXFP8BlockScaling(), recipes.DelayedScaling(amax_history_len=4)])
def test_masters_start_from_preserved_values(recipe):
    model = small_model(recipe)
    weight = model[0].weight
    kept = weight.get_high_precision_init_val().clone()
    assert not torch.equal(kept, weight.dequantize()), "the test can tell"
    with cg.autocast(recipe=recipe):  # which changes the scales of delayed scaling
        model(torch.randn(32, 64, dtype=torch.bfloat16)).sum().backward()
    opt = FusedAdam(model.parameters(), lr=0.0, master_weights=True)
    opt.step()
    assert torch.equal(opt.state[weight]["master_param"], kept.float())
    assert weight.get_high_precision_init_val() is None


def test_a_preserved_value_that_was_overwritten_is_not_used():
    model = small_model(recipes.MXFP8BlockScaling())
    weight = model[0].weight
    other = torch.randn(96, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        weight.copy_(other)
    weight.grad = torch.zeros(96, 64, dtype=torch.bfloat16)
    opt = FusedAdam([weight], lr=0.0, master_weights=True)
    opt.step()
    assert torch.equal(opt.state[weight]["master_param"], weight.dequantize(dtype=torch.float32))


def test_quantized_parameters_need_masters():
    p, other = quantized_parameter(QUANTIZERS["mxfp8"]()), nn.Parameter(torch.zeros(3))
    p.grad, other.grad = gradient(0), torch.ones(3)
    with pytest.raises(RuntimeError, match="MXFP8Tensor of shape .* needs master_weights=True"):
        FusedAdam([other, p]).step()
    assert torch.equal(other, torch.zeros(3)), "nothing is updated"


def test_delayed_fp8_without_masters_is_allowed_and_warns():
    p = quantized_parameter(QUANTIZERS["fp8_delayed"]())
    p.grad = gradient(0)
    with warned("without master weights"):
        FusedAdam([p], lr=1.0).step()
    assert type(p) is cg.Float8Tensor


@pytest.mark.parametrize(
    "options, message",
    [
        ({"amsgrad": True}, "does not support amsgrad"),
        (
            {"master_weight_dtype": torch.bfloat16},
            "master_weight_dtype must be torch.float32 or torch.float16, got torch.bfloat16",
        ),
        ({"exp_avg_dtype": torch.float64}, "exp_avg_dtype must be .*, got torch.float64"),
        ({"store_param_remainders": True}, "store_param_remainders=True needs master_weights=True"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(RuntimeError, match=message):
        FusedAdam([nn.Parameter(torch.zeros(2))], **options)


# ---- 16-bit parameters -------------------------------------------------------------------------------


def test_remainders_restore_every_master():
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int64).to(torch.int32)
    masters = bits.view(torch.float32)
    rounded, remainder = split_master(masters)
    assert rounded.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(join_master(rounded, remainder).view(torch.int32), bits)
    finite = masters.isfinite() & (masters.abs() < 3e38)
    assert ((rounded.float() - masters).abs() <= (masters.bfloat16().float() - masters).abs())[finite].all(), "nearest"


def test_remainders_train_like_masters():
    p, q = (nn.Parameter(weight_value()) for _ in range(2))
    with_remainders = FusedAdam([p], lr=1e-4, master_weights=True, store_param_remainders=True)
    with_masters = FusedAdam([q], lr=1e-4, master_weights=True)
    run_steps(with_remainders, [p], 20)
    run_steps(with_masters, [q], 20)
    assert with_remainders.state[p]["master_param"].dtype == torch.int16
    assert torch.equal(with_remainders.get_unscaled_state(p, "master_param"), with_masters.state[q]["master_param"])
    torch.testing.assert_close(p, q, rtol=2**-7, atol=0)  # ties go up instead of to even


def test_16_bit_parameters_without_masters_are_updated_in_float32():
    p = nn.Parameter(weight_value())
    q = nn.Parameter(weight_value().float())
    p.grad = gradient(0).bfloat16()
    q.grad = p.grad.float()
    FusedAdam([p], lr=1e-2).step()
    FusedAdam([q], lr=1e-2).step()
    assert p.dtype == torch.bfloat16 and torch.equal(p, q.bfloat16())


def test_decoupled_gradients():
    p = quantized_parameter(QUANTIZERS["nvfp4"]())
    q = quantized_parameter(QUANTIZERS["nvfp4"]())
    opt = FusedAdam([p], master_weights=True, use_decoupled_grad=True)
    p.decoupled_grad, q.grad = gradient(0), gradient(0)
    opt.step()
    FusedAdam([q], master_weights=True).step()
    assert_same_bytes(p, q)
    opt.zero_grad()
    assert p.decoupled_grad is None
    p.grad = gradient(0)
    before = p.dequantize()
    opt.step()
    assert torch.equal(p.dequantize(), before), ".grad is not read"


def test_tensors_that_are_not_contiguous():
    p, q = nn.Parameter(torch.randn(6, 4).t()), nn.Parameter(torch.zeros(4, 6))
    with torch.no_grad():
        q.copy_(p)
    p.grad, q.grad = torch.randn(4, 6), None
    q.grad = p.grad.clone()
    FusedAdam([p]).step()
    FusedAdam([q]).step()
    assert torch.equal(p, q)


def test_zero_grad():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    FusedAdam([p], set_grad_none=False).zero_grad()
    assert torch.equal(p.grad, torch.zeros(2))
    FusedAdam([p]).zero_grad()
    assert p.grad is None


# ---- checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("remainders", [False, True])
def test_training_goes_on_from_a_checkpoint(dtype, remainders, tmp_path):
    options = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "store_param_remainders": remainders}

    def made():
        params = [
            quantized_parameter(hybrid_of("mxfp8", "nvfp4")),
            nn.Parameter(weight_value(2)),
            nn.Parameter(torch.ones(3)),
        ]
        return params, FusedAdam(params, lr=1e-3, master_weights=True, **options)

    params, opt = made()
    run_steps(opt, params)
    torch.save({"opt": opt.state_dict(), "params": params}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint")
    for state in saved["opt"]["state"].values():
        assert all(value.dtype == torch.float32 for value in state.values())

    others, again = made()
    for mine, theirs in zip(others, saved["params"], strict=True):
        mine.data.copy_(theirs.data)
    again.load_state_dict(saved["opt"])
    assert again.param_groups[0]["step"] == 3
    run_steps(opt, params)
    run_steps(again, others)
    assert_same_bytes(others[0], params[0])
    for mine, theirs in zip(others[1:], params[1:], strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(
        again.get_unscaled_state(others[0], "master_param"), opt.get_unscaled_state(params[0], "master_param")
    )


def test_shapes_of_states():
    p = nn.Parameter(torch.tensor(1.0))
    opt = FusedAdam([p], exp_avg_dtype=torch.uint8)
    run_steps(opt, [p])
    assert opt.get_unscaled_state(p, "exp_avg").shape == ()
