"""GroupedLinear against one linear operation per group."""

import copy

import pytest
import torch
from torch import Tensor

import crossgrain as cg
from crossgrain import ops
from crossgrain.ops.basic.grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY
from crossgrain.quantizers.groups_alike import validate_grouped_quantizer_list
from crossgrain.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling, QuantizerRole, factories

from ...common.ops_cases import RECIPES, TWINS, assert_close, assert_same, grads_of, quantized

SIZES = [32, 0, 64]


def _sizes(sizes: list[int] | None = None) -> Tensor:
    return torch.tensor(SIZES if sizes is None else sizes)


def _single(op: ops.GroupedLinear) -> ops.GroupedLinear:
    """The same layer with one weight and one bias parameter."""
    single = ops.GroupedLinear(
        op.num_groups, op.in_features, op.out_features, single_grouped_weight=True, single_grouped_bias=True
    )
    with torch.no_grad():
        single.weight.copy_(torch.stack([getattr(op, f"weight{g}") for g in range(op.num_groups)]))
        single.bias.copy_(torch.stack([getattr(op, f"bias{g}") for g in range(op.num_groups)]))
    return single


def _op(**options: bool) -> ops.GroupedLinear:
    op = ops.GroupedLinear(3, 64, 32, **options)
    for name in op.bias_names:
        torch.nn.init.normal_(getattr(op, name))
    return op


def _without_random_rounding(name: str) -> cg.recipe.Recipe:
    """Rounding at random takes its numbers in another order in single layers."""
    return NVFP4BlockScaling(disable_stochastic_rounding=True) if name == "nvfp4" else RECIPES[name]()


@pytest.mark.parametrize("recipe", [None, "mxfp8", "nvfp4", "fp8", "fp8_delayed", "fp8_block", "hybrid_identity"])
def test_equals_single_layers(recipe: str | None) -> None:
    op = _op()
    layers = [cg.Linear(64, 32) for _ in SIZES]
    for g, layer in enumerate(layers):
        layer.load_state_dict({"weight": getattr(op, f"weight{g}"), "bias": getattr(op, f"bias{g}")})
    x, dy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 32)
    made_recipe = None if recipe is None else _without_random_rounding(recipe)
    made = grads_of(lambda: op(x, _sizes()), [x, *op.parameters()], dy, made_recipe)
    wanted = grads_of(
        lambda: torch.cat([layer(rows) for layer, rows in zip(layers, x.split(SIZES), strict=True)]),
        [x, *(layer.weight for layer in layers), *(layer.bias for layer in layers)],
        dy,
        made_recipe,
    )
    assert_same(made, wanted)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_single_parameters_compute_the_same(recipe: str | None) -> None:
    op = _op()
    single = _single(op)
    x, dy = torch.randn(2, 48, 64, requires_grad=True), torch.randn(2, 48, 32)
    made_recipe = None if recipe is None else RECIPES[recipe]()
    y, dx, *grads = grads_of(lambda: op(x, _sizes()), [x, *op.parameters()], dy, made_recipe)
    wanted = [y, dx, torch.stack(grads[:3]), torch.stack(grads[3:])]
    assert_same(grads_of(lambda: single(x, _sizes()), [x, single.weight, single.bias], dy, made_recipe), wanted)


@pytest.mark.parametrize("name", TWINS)
def test_hybrid_of_twins_is_the_format(name: str) -> None:
    op = _op()
    x, dy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 32)
    plain, twins = (grads_of(lambda: op(x, _sizes()), [x, *op.parameters()], dy, recipe()) for recipe in TWINS[name])
    assert_same(plain, twins)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "hybrid_mxfp8_nvfp4"])
@pytest.mark.parametrize("single", [False, True])
def test_delayed_weight_gradients(single: bool, recipe: str | None) -> None:
    op = _op(single_grouped_weight=single)
    late = copy.deepcopy(op)
    late.delay_wgrad_compute = True
    x = torch.randn(96, 64)
    for layer in (op, late):
        for _ in range(2):
            torch.manual_seed(3)
            with quantized(None if recipe is None else RECIPES[recipe]()):
                y = layer(x, _sizes())
            y.square().sum().backward()
    assert late.need_backward_dw() and all(getattr(late, name).grad is None for name in late.weight_names)
    late.backward_dw()
    assert not late.need_backward_dw()
    assert_same([p.grad for p in op.parameters()], [p.grad for p in late.parameters()])


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_gradients_added_to_main_grad(single: bool, delay: bool) -> None:
    op = _op(single_grouped_weight=single)
    into = copy.deepcopy(op)
    into.accumulate_into_main_grad, into.delay_wgrad_compute = True, delay
    for name in into.weight_names:
        getattr(into, name).main_grad = torch.ones(getattr(into, name).shape)
    x = torch.randn(96, 64)
    for layer in (op, into):
        layer(x, _sizes()).sum().backward()
    into.backward_dw()
    for name in op.weight_names:
        assert getattr(into, name).grad is None
        assert_close([getattr(into, name).main_grad], [getattr(op, name).grad + 1], torch.float32)


def test_scaled_bias() -> None:
    op = _op(scale_bias=True)
    x, scales, dy = torch.randn(96, 64), torch.rand(96, requires_grad=True), torch.randn(96, 32)
    biases = [op.bias0, op.bias1, op.bias2]
    weights = [op.weight0, op.weight1, op.weight2]

    def reference() -> Tensor:
        parts = zip(x.split(SIZES), scales.split(SIZES), weights, biases, strict=True)
        return torch.cat([rows @ w.t() + b * s.unsqueeze(-1) for rows, s, w, b in parts])

    tensors = [scales, *biases, *weights]
    assert_close(
        grads_of(lambda: op(x, _sizes(), scales), tensors, dy), grads_of(reference, tensors, dy), torch.float32
    )


def test_buffers_of_the_caller() -> None:
    op, x = _op(), torch.randn(96, 64, requires_grad=True)
    out, dx = torch.empty(96, 32), torch.empty(96, 64)
    y = op(x, _sizes(), **{OUTPUT_BUFFER_KEY: out, GRAD_INPUT_BUFFER_KEY: dx})
    assert y.data_ptr() == out.data_ptr() and torch.equal(y, op(x, _sizes()))
    y.sum().backward()
    assert torch.equal(dx, x.grad)


@pytest.mark.parametrize(
    "buffer",
    [torch.empty(96, 16), torch.empty(32, 96), torch.empty(96, 32, dtype=torch.bfloat16)],
    ids=["columns", "transposed", "dtype"],
)
def test_buffers_of_another_shape_or_dtype_are_refused(buffer: torch.Tensor) -> None:
    """copy_ would cast, or spread numbers over other rows."""
    op, x = _op(), torch.randn(96, 64, requires_grad=True)
    with pytest.raises(ValueError, match=r"output_buffer must have the shape \[96, 32\] and the dtype torch.float32"):
        op(x, _sizes(), **{OUTPUT_BUFFER_KEY: buffer})
    y = op(x, _sizes(), **{GRAD_INPUT_BUFFER_KEY: buffer})
    with pytest.raises(ValueError, match=r"grad_input_buffer must have the shape \[96, 64\]"):
        y.sum().backward()


def test_roles_of_every_group() -> None:
    seen: list[QuantizerRole | None] = []

    def factory(role: QuantizerRole | None) -> cg.Quantizer:
        seen.append(role)
        return cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)

    op = ops.GroupedLinear(2, 32, 32, name="experts")
    with quantized(CustomRecipe(qfactory=factory)):
        op(torch.randn(32, 32), _sizes([32, 0]))
    names = ["input", "weight"] * 2 + ["grad_output"] * 2
    assert seen == [QuantizerRole("grouped_linear", tensor, "experts") for tensor in names]


def test_state_dict_and_meta() -> None:
    op = ops.GroupedLinear(2, 8, 8, device="meta")
    assert list(op.state_dict()) == ["weight0", "weight1", "bias0", "bias1"]
    op(torch.randn(4, 8), _sizes([1, 3])).sum().backward()
    assert op.weight1.grad is not None
    single = ops.GroupedLinear(2, 8, 8, single_grouped_weight=True, single_grouped_bias=True)
    assert {name: tuple(value.shape) for name, value in single.state_dict().items()} == {
        "weight": (2, 8, 8),
        "bias": (2, 8),
    }
    before = single.weight.clone()
    single.reset_parameters()
    assert not torch.equal(before, single.weight)


@pytest.mark.parametrize("sizes", [[96], [32, 32, 31], [-32, 64, 64]])
def test_sizes_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="must be 3 numbers >= 0 that add up to 96 rows"):
        _op()(torch.randn(96, 64), _sizes(sizes))


# ---- quantizers of groups have to be alike -----------------------------------------------------------


def _mx(dtype: cg.DType = cg.DType.kFloat8E4M3) -> cg.Quantizer:
    return cg.MXFP8Quantizer(dtype)


def _hybrid(columns: cg.Quantizer, source: str = "original") -> cg.Quantizer:
    return cg.HybridQuantizer(rowwise_quantizer=_mx(), columnwise_quantizer=columns, columnwise_source=source)


@pytest.mark.parametrize(
    "quantizers, message",
    [
        ([_mx(), cg.NVFP4Quantizer()], "use incompatible plain backend families: MXFP8Quantizer and NVFP4Quantizer"),
        ([_mx(), _mx(cg.DType.kFloat8E5M2)], "use incompatible plain backend configurations: .*dtype="),
        ([_mx(), None], "mix None and concrete quantizers"),
        ([_mx(), _hybrid(_mx())], "mix HybridQuantizer and non-hybrid quantizers"),
        ([_hybrid(_mx()), _hybrid(cg.IdentityQuantizer())], "mix Identity-backed and quantized directions"),
        ([_hybrid(_mx()), _hybrid(_mx(), "rowwise_dequantized")], "mixed columnwise source policies"),
        ([_hybrid(_mx()), _hybrid(cg.NVFP4Quantizer())], "use incompatible columnwise backend families"),
        ([cg.IdentityQuantizer(), cg.IdentityQuantizer(dtype=torch.bfloat16)], "IdentityQuantizer with dtype="),
    ],
)
def test_unlike_quantizers_are_refused(quantizers: list[cg.Quantizer | None], message: str) -> None:
    with pytest.raises(ValueError, match=f"the input quantizers of expert 0 and expert 1 .*{message}"):
        validate_grouped_quantizer_list(quantizers, operand_name="input")


def test_alike_quantizers_are_accepted() -> None:
    validate_grouped_quantizer_list([])
    validate_grouped_quantizer_list([None, None])
    one, other = _hybrid(cg.NVFP4Quantizer()), _hybrid(cg.NVFP4Quantizer())
    other.set_usage(columnwise=False)
    validate_grouped_quantizer_list([one, other])
    delayed = [cg.Float8Quantizer(torch.ones(1), torch.zeros(1), cg.DType.kFloat8E4M3) for _ in range(2)]
    validate_grouped_quantizer_list(delayed)


def test_a_factory_that_treats_groups_differently_is_refused() -> None:
    calls = iter(range(100))

    def factory(role: QuantizerRole) -> cg.Quantizer:
        return factories.mxfp8_factory(role) if next(calls) < 2 else factories.nvfp4_factory(role)

    with (
        quantized(CustomRecipe(qfactory=factory)),
        pytest.raises(ValueError, match="input quantizers of expert 0 and expert 1"),
    ):
        _op()(torch.randn(96, 64), _sizes())


def test_quantized_parameters_of_single_weights() -> None:
    """Blocks do not cross groups: the parts of one weight are what the weights of groups would be."""
    with cg.quantized_model_init(recipe=MXFP8BlockScaling()):
        op = ops.GroupedLinear(3, 64, 32, bias=False, single_grouped_weight=True)
    assert isinstance(op.weight, cg.MXFP8Tensor) and op.weight.shape == (3, 32, 64)
    plain = ops.GroupedLinear(3, 64, 32, bias=False)
    with torch.no_grad():
        for g in range(3):
            getattr(plain, f"weight{g}").copy_(op.weight.dequantize()[g])
    x, dy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 32)
    recipe = MXFP8BlockScaling()
    y, dx, dw = grads_of(lambda: op(x, _sizes()), [x, op.weight], dy, recipe)
    wanted_y, wanted_dx, *wanted_dw = grads_of(lambda: plain(x, _sizes()), [x, *plain.parameters()], dy, recipe)
    assert_same([y, dw], [wanted_y, torch.stack(wanted_dw)])
    # dgrad reads the columnwise plane, which was made from the original and not from the rowwise plane.
    assert (dx - wanted_dx).norm() < 0.05 * wanted_dx.norm()
