"""BasicLinear, Linear and Bias."""

import copy
import pickle

import pytest
import torch

import crossgrain as cg
from crossgrain import ops
from crossgrain.recipe import CustomRecipe, DelayedScaling, MXFP8BlockScaling, QuantizerRole, Recipe

from ..common.ops_cases import RECIPES, TWINS, assert_close, assert_same, grads_of, quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_high_precision_equals_torch(bias: bool, dtype: torch.dtype) -> None:
    op = ops.Linear(24, 40, bias=bias, dtype=dtype)
    if bias:
        torch.nn.init.normal_(op.bias)
    x, dy = torch.randn(3, 5, 24, dtype=dtype, requires_grad=True), torch.randn(3, 5, 40, dtype=dtype)
    wide = copy.deepcopy(op).double()
    x64 = x.detach().double().requires_grad_()
    wanted = grads_of(
        lambda: torch.nn.functional.linear(x64, wide.weight, wide.bias), [x64, *wide.parameters()], dy.double()
    )
    assert_close(grads_of(lambda: op(x), [x, *op.parameters()], dy), wanted, dtype)


@pytest.mark.parametrize("dtype, rows", [(torch.float32, 32), (torch.bfloat16, 32), (torch.bfloat16, 20)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_is_bit_for_bit_the_module(recipe: str, dtype: torch.dtype, rows: int) -> None:
    op, module = ops.Linear(64, 48, dtype=dtype), cg.Linear(64, 48, params_dtype=dtype)
    torch.nn.init.normal_(op.bias)
    module.load_state_dict(op.state_dict())
    x, dy = torch.randn(rows, 64, dtype=dtype, requires_grad=True), torch.randn(rows, 48, dtype=dtype)
    for _ in range(2):  # delayed scaling learns from the first step
        made = grads_of(lambda: op(x), [x, op.weight, op.bias], dy, RECIPES[recipe]())
        wanted = grads_of(lambda: module(x), [x, module.weight, module.bias], dy, RECIPES[recipe]())
        assert_same(made, wanted)
    assert_same([copy.deepcopy(op)(x)], [module(x)])


def test_a_bias_of_its_own_is_added_by_the_gemm_as_that_of_a_linear_operation() -> None:
    linear, bias = ops.BasicLinear(64, 48, dtype=torch.bfloat16), ops.Bias(48, dtype=torch.bfloat16)
    torch.nn.init.normal_(bias.bias)
    both = ops.Linear(64, 48, dtype=torch.bfloat16)
    both.load_state_dict({"weight": linear.weight, "bias": bias.bias}, strict=False)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with cg.autocast(recipe=MXFP8BlockScaling()):
        assert torch.equal(ops.Sequential(linear, bias)(x), both(x))


def test_a_bound_recipe_is_that_of_all_it_is_made_of() -> None:
    op, x = ops.Linear(64, 48), torch.randn(32, 64)
    plain = op(x)
    op.bound_recipe = MXFP8BlockScaling()
    with cg.autocast(recipe=MXFP8BlockScaling()):
        wanted = op(x)
    assert torch.equal(op(x), wanted) and not torch.equal(wanted, plain)
    assert copy.deepcopy(op).bound_recipe == op.bound_recipe
    op.bound_recipe = None
    assert torch.equal(op(x), plain)


@pytest.mark.parametrize("name", TWINS)
def test_hybrid_of_twins_is_the_format(name: str) -> None:
    block = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.Linear(64, 64))
    x, dy = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    plain, twins = (grads_of(lambda: block(x), [x, *block.parameters()], dy, recipe()) for recipe in TWINS[name])
    assert_same(plain, twins)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(override: str) -> None:
    op, module = ops.Linear(64, 32, bias=False), cg.Linear(64, 32, bias=False)
    module.load_state_dict(op.state_dict())
    block = ops.Sequential(ops.Identity(), op)
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 32)
    recipe = MXFP8BlockScaling(backward_override=override)
    assert_same(
        grads_of(lambda: block(x), [x, op.weight], dy, recipe),
        grads_of(lambda: module(x), [x, module.weight], dy, recipe),
    )


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    op = ops.BasicLinear(32, 32)
    x = torch.randn(32, 32)
    with quantized(MXFP8BlockScaling()):
        op(x).sum().backward()
    assert op.weight.grad is not None
    op.weight.requires_grad_(False)
    x.requires_grad_()
    with quantized(MXFP8BlockScaling()):
        op(x).sum().backward()
    assert x.grad is not None


def test_gradient_added_to_main_grad() -> None:
    op = ops.BasicLinear(32, 48, accumulate_into_main_grad=True)
    x = torch.randn(16, 32)
    (wanted,) = torch.autograd.grad(torch.nn.functional.linear(x, op.weight).sum(), [op.weight])
    op.weight.main_grad = torch.ones(48, 32)
    op(x).sum().backward()
    assert op.weight.grad is None
    assert_close([op.weight.main_grad], [wanted + 1], torch.float32)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8"])
def test_the_weight_chooses_the_dtype(recipe: str | None) -> None:
    op = ops.Linear(32, 32, dtype=torch.bfloat16)
    x = torch.randn(32, 32, requires_grad=True)
    with cg.autocast(enabled=recipe is not None, recipe=RECIPES[recipe]() if recipe else None):
        y = op(x)
        rounded = op(x.detach().bfloat16())
    assert torch.equal(y, rounded) and y.dtype == torch.bfloat16
    y.backward(torch.ones_like(y))
    assert x.grad is not None and (x.grad.dtype, op.weight.grad.dtype) == (torch.float32, torch.bfloat16)


def test_torch_autocast_chooses_the_dtype() -> None:
    op, x = ops.Sequential(ops.Linear(32, 32), ops.GELU()), torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert op(x).dtype == torch.bfloat16


# ---- quantizers ------------------------------------------------------------------------------------


def test_roles() -> None:
    seen: list[QuantizerRole | None] = []

    def factory(role: QuantizerRole | None) -> cg.Quantizer:
        seen.append(role)
        return cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)

    op = ops.Linear(32, 32, name="fc")
    with quantized(CustomRecipe(qfactory=factory)):
        op(torch.randn(32, 32))
    assert seen == [QuantizerRole("linear", t, "fc") for t in ("input", "weight", "grad_output")]
    linear = op.basic_ops[0]
    assert linear.num_quantizers("forward") == 2 and linear.num_quantizers("backward") == 1
    assert op.get_input_quantizer() is linear.get_quantizer("forward", 0)
    assert linear.get_grad_output_quantizer() is linear.get_quantizer("backward", 0)
    assert op.get_grad_output_quantizer() is None, "a bias takes gradients in high precision"
    with pytest.raises(ValueError, match="has 1 backward quantizers, so there is no index 1"):
        linear.get_quantizer("backward", 1)


def test_no_quantizers_without_a_recipe() -> None:
    op = ops.BasicLinear(32, 32)
    with quantized(MXFP8BlockScaling()):
        op(torch.randn(32, 32))
    assert op.get_input_quantizer() is not None
    op(torch.randn(32, 32))
    assert op.get_input_quantizer() is None and op.get_quantizer("forward", 1) is None


def test_layers_are_named_by_path() -> None:
    model = torch.nn.ModuleDict({"mlp": ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 8), ops.BasicLinear(8, 8))})
    cg.name_layers(model)
    assert [model["mlp"][i].name for i in (1, 2)] == ["mlp.1", "mlp.2"]


def test_usages_before_forward() -> None:
    op = ops.BasicLinear(32, 32)
    op.reset_recipe_state(recipe=MXFP8BlockScaling())
    quantizers = {
        "input": op.get_quantizer("forward", 0),
        "weight": op.get_quantizer("forward", 1),
        "grad_output": op.get_quantizer("backward", 0),
    }

    def columnwise() -> dict[str, bool]:
        assert all(quantizer.rowwise_usage for quantizer in quantizers.values())
        return {name: quantizer.columnwise_usage for name, quantizer in quantizers.items()}

    op.pre_fuser_forward(requires_grad=True)
    assert columnwise() == {"input": True, "weight": True, "grad_output": True}
    op.pre_fuser_forward(requires_grad=False)
    assert columnwise() == {"input": False, "weight": False, "grad_output": False}
    op.weight.requires_grad_(False)
    op.pre_fuser_forward(requires_grad=True)
    assert columnwise() == {"input": False, "weight": True, "grad_output": False}


def test_no_columns_of_activations_with_a_backward_override() -> None:
    op = ops.BasicLinear(32, 32)
    op.reset_recipe_state(recipe=MXFP8BlockScaling(backward_override="dequantized"))
    op.pre_fuser_forward(requires_grad=True)
    assert not op.get_quantizer("forward", 0).columnwise_usage
    assert not op.get_quantizer("backward", 0).columnwise_usage


# ---- parameters and state --------------------------------------------------------------------------


def test_state_dict_is_that_of_the_modules() -> None:
    op = ops.Linear(16, 24)
    assert list(op.state_dict()) == ["weight", "bias"] == [name for name, _ in op.named_parameters()]
    for module in (torch.nn.Linear(16, 24), cg.Linear(16, 24)):
        module.load_state_dict(op.state_dict())
        op.load_state_dict(module.state_dict())
    assert list(ops.Sequential(op).state_dict()) == ["0.weight", "0.bias"]


def test_histories_travel_in_the_state_dict() -> None:
    op, module = ops.Linear(16, 24), cg.Linear(16, 24)
    x = torch.randn(8, 16, requires_grad=True)
    for layer in (op, module):
        with quantized(DelayedScaling(amax_history_len=4)):
            layer(x).sum().backward()
    state = op.state_dict()
    assert list(state) == ["weight", "bias", "_extra_state"]
    again = ops.Linear(16, 24)
    again.load_state_dict(state)
    assert torch.equal(again.state_dict()["_extra_state"], state["_extra_state"])


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_parameters_are_used(assign: bool) -> None:
    op, state = ops.Linear(8, 8), ops.Linear(8, 8).state_dict()
    op.load_state_dict(state, assign=assign)
    x = torch.randn(4, 8)
    assert_close([op(x)], [torch.nn.functional.linear(x, state["weight"], state["bias"])], torch.float32)


def test_replaced_parameters_are_used() -> None:
    op, x = ops.Linear(8, 8), torch.randn(4, 8)
    op.weight = torch.nn.Parameter(torch.zeros(8, 8))
    assert not op(x).any()
    assert op.double().basic_ops[0].weight.dtype == torch.float64
    assert op(x.double()).dtype == torch.float64


def test_copies_are_independent() -> None:
    op, x = ops.Linear(32, 32), torch.randn(32, 32)
    with quantized(MXFP8BlockScaling()):
        y = op(x)
        for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
            assert torch.equal(other(x), y)
            assert other.weight is other.basic_ops[0].weight is not op.weight


def test_meta_parameters_are_made_at_the_first_forward() -> None:
    op = ops.Linear(8, 8, device="meta")
    assert op.weight.is_meta
    op(torch.randn(4, 8)).sum().backward()
    assert op.weight.grad is not None and op.bias.grad is not None


# ---- errors ----------------------------------------------------------------------------------------


def test_errors() -> None:
    with pytest.raises(ValueError, match="must be 32"):
        ops.Linear(32, 8)(torch.randn(4, 31))
    with pytest.raises(ValueError, match="sequence_parallel needs a tensor_parallel_mode"):
        ops.Linear(8, 8, sequence_parallel=True)
    with pytest.raises(ValueError, match="tensor_parallel_mode"):
        ops.Linear(8, 8, tensor_parallel_mode="diagonal")
    with pytest.raises(NotImplementedError, match="userbuffers_options"):
        ops.BasicLinear(8, 8, userbuffers_options={"comm_name": "qkv"})


def test_a_weight_of_another_recipe_is_refused() -> None:
    with cg.quantized_model_init(recipe=MXFP8BlockScaling()):
        op = ops.Linear(32, 32)
    with quantized(RECIPES["fp8"]()), pytest.raises(RuntimeError, match="cannot be used with Float8CurrentScaling"):
        op(torch.randn(32, 32))


def test_calibration_takes_statistics_only() -> None:
    op, x = ops.BasicLinear(16, 16), torch.randn(16, 16)
    recipe: Recipe = DelayedScaling(amax_history_len=2)
    with cg.autocast(enabled=False, calibrating=True, recipe=recipe):
        y = op(x)
    assert_close([y], [torch.nn.functional.linear(x, op.weight)], torch.float32)
    history = op._built.states["forward"].delayed.amax_history
    assert float(history.max()) == pytest.approx(float(max(x.abs().max(), op.weight.abs().max())))
