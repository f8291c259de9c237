"""GroupedLinear: what a linear layer for each group computes, however operands are quantized and weights are kept."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE
from crossgrain import recipe as recipes
from crossgrain.linear import split_quantize as splitting
from crossgrain.linear.split_quantize import split_quantize
from crossgrain.recipe import CustomRecipe, MXFP8BlockScaling, factories, read_extra_state

from ..common.families import PLAIN, make_hybrid_recipe, make_recipe
from ..common.modules import (
    FAMILIES,
    HYBRIDS,
    assert_near,
    assert_same,
    check_hybrid_is_plain,
    check_near_high_precision,
    check_validation_changes_nothing,
    drop_usages_in_inference,
    recipe_named,
    step,
)
from ..common.quantizers import QUANTIZERS

SPLITS = {"aligned": [32, 64, 32], "ragged": [20, 7, 33], "empty": [0, 64, 0], "all_empty": [0, 0, 0]}


def make(**options):
    torch.manual_seed(1)
    layer = cg.GroupedLinear(3, 64, 128, **options)
    for name in layer.bias_names:
        torch.nn.init.normal_(getattr(layer, name))
    return layer


def inputs(splits="aligned", dtype=torch.float32):
    rows = sum(SPLITS[splits])
    return torch.randn(rows, 64, dtype=dtype), torch.randn(rows, 128, dtype=dtype)


def linears(layer):
    """A Linear for each group, with the same numbers."""
    made = []
    for weight, bias in zip(layer._group_weights(), layer._group_biases(), strict=True):
        linear = cg.Linear(64, 128, params_dtype=weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        made.append(linear)
    return made


def without_seeds(name):
    """Groups that are quantized together draw one seed: what is compared must round to nearest."""
    if name == "nvfp4":
        return recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    return recipe_named(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("name", [None, *FAMILIES, "mxfp8_fwd_high_precision_bwd", "nvfp4_row_scaled_fwd_mxfp8_bwd"])
def test_is_a_linear_layer_for_each_group(name, splits, dtype):
    """Bitwise, gradients included: quantized together or one by one, padded or not."""
    layer = make(params_dtype=dtype)
    x, dy = inputs(splits, dtype)
    recipe = None if name is None else without_seeds(name)
    sizes = SPLITS[splits]
    only_grouped = name == "nvfp4_row_scaled_fwd_mxfp8_bwd"  # which leaves other layers in MXFP8
    apart_recipe = recipes.as_recipe("nvfp4-fwd-mxfp8-bwd") if only_grouped else recipe
    together = step(layer, x, recipe, dy, m_splits=sizes)
    apart = [
        step(linear, rows, apart_recipe, d_rows)
        for linear, rows, d_rows in zip(linears(layer), x.split(sizes), dy.split(sizes), strict=True)
    ]
    assert torch.equal(together["y"], torch.cat([group["y"] for group in apart]))
    assert torch.equal(together["dx"], torch.cat([group["dx"] for group in apart]))
    for g, group in enumerate(apart):
        assert torch.equal(together[f"d weight{g}"], group["d weight"])
        assert torch.equal(together[f"d bias{g}"], group["d bias"])


@pytest.mark.parametrize("splits", ["aligned", "ragged"])
@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_near_high_precision(name, splits):
    check_near_high_precision(make(), *inputs(splits), name, layers=1, m_splits=SPLITS[splits])


@pytest.mark.parametrize("splits", ["aligned", "ragged", "empty"])
@pytest.mark.parametrize("family", PLAIN)
def test_hybrid_of_one_format_is_bitwise_that_format(family, splits):
    check_hybrid_is_plain(make, lambda: inputs(splits), family, m_splits=SPLITS[splits])


def test_sizes_may_be_a_tensor_and_rows_in_several_dimensions():
    layer = make()
    x = torch.randn(4, 32, 64)
    y = layer(x, torch.tensor([32, 64, 32]))
    assert y.shape == (4, 32, 128)
    assert torch.equal(y.reshape(-1, 128), layer(x.reshape(-1, 64), SPLITS["aligned"]))


@pytest.mark.parametrize("sizes", [[64, 64], [64, 64, 64], [-32, 64, 96]])
def test_sizes_that_do_not_divide_the_rows_are_refused(sizes):
    with pytest.raises(ValueError, match="m_splits must have 3 numbers >= 0 that add up to 128 rows"):
        make()(inputs()[0], sizes)


# ---- quantizing groups together -------------------------------------------------------------------------

TOGETHER = {"mxfp8": [32, 0, 64, 32], "fp8_block": [128, 0, 256, 20], "identity": [3, 0, 5, 1]}


@pytest.mark.parametrize("name", TOGETHER)
def test_one_call_makes_the_bytes_of_many(name, monkeypatch):
    sizes = TOGETHER[name]
    quantizers = [QUANTIZERS[name]() for _ in sizes]
    rows = torch.randn(sum(sizes), 256) * torch.logspace(-3, 3, 256)
    calls = count_calls(monkeypatch)
    together = split_quantize(
        rows, sizes, [quantizer.storing(rowwise=True, columnwise=True) for quantizer in quantizers]
    )
    assert len(calls) == 1
    for group, part, quantizer in zip(together, rows.split(sizes), quantizers, strict=True):
        alone = quantizer(part)
        for direction in (ROWWISE, COLUMNWISE):
            mine, theirs = group.plane(direction), alone.plane(direction)
            assert mine.shape == theirs.shape and mine.format == theirs.format
            if not mine.format.is_identity:
                assert torch.equal(mine.operand_codes(), theirs.operand_codes())
                assert torch.equal(mine.operand_scales(), theirs.operand_scales())
        assert torch.equal(group.dequantize(), alone.dequantize())


def count_calls(monkeypatch):
    calls = []
    quantize = splitting._quantized
    monkeypatch.setattr(splitting, "_quantized", lambda *arguments: calls.append(arguments) or quantize(*arguments))
    return calls


@pytest.mark.parametrize(
    "row, column, sizes, source, ways",
    [
        ("mxfp8", "mxfp8", [32, 64], "original", ["whole"]),
        ("mxfp8", "mxfp8", [33, 63], "original", ["refused"]),  # layers pad such groups before
        ("fp8_block", "fp8_block", [128, 20], "original", ["whole"]),
        ("fp8_block", "fp8_block", [20, 128], "original", ["groups"]),  # a block of 128 rows would be of both
        ("fp8", "fp8", [32, 32], "original", ["groups"]),  # an amax for each group
        ("nvfp4", "mxfp8", [32, 32], "original", ["groups"]),
        ("mxfp8", "identity", [32, 5], "original", ["whole"]),
        ("mxfp8", "mxfp8", [32, 64], "rowwise_dequantized", ["whole"]),
        ("nvfp4", "mxfp8", [32, 32], "rowwise_dequantized", ["whole", "whole"]),  # a call for each group
    ],
)
def test_how_groups_are_quantized(row, column, sizes, source, ways, monkeypatch):
    def hybrid():
        children = {"rowwise_quantizer": QUANTIZERS[row](), "columnwise_quantizer": QUANTIZERS[column]()}
        return cg.HybridQuantizer(**children, columnwise_source=source)

    calls = count_calls(monkeypatch)
    knowing = splitting.quantize_groups
    monkeypatch.setattr(splitting, "quantize_groups", lambda *call: calls.append("groups") or knowing(*call))
    rows = torch.randn(sum(sizes), 128)
    if ways == ["refused"]:
        with pytest.raises(ValueError, match=r"\[33, 128\] columnwise as mxfp8.*multiple of 32"):
            split_quantize(rows, sizes, [hybrid().storing(rowwise=True, columnwise=True) for _ in sizes])
        return
    split_quantize(rows, sizes, [hybrid().storing(rowwise=True, columnwise=True) for _ in sizes])
    assert ["groups" if call == "groups" else "whole" for call in calls] == ways


def test_rows_with_an_amax_each_are_quantized_together(monkeypatch):
    calls = count_calls(monkeypatch)
    quantizers = [cg.NVFP4Quantizer(row_scaled_nvfp4=True) for _ in range(2)]
    rows = torch.randn(48, 64)
    parts = split_quantize(
        rows, [17, 31], [quantizer.storing(rowwise=True, columnwise=False) for quantizer in quantizers]
    )
    assert len(calls) == 1
    quantizers[0].set_usage(columnwise=False)
    alone = quantizers[0].quantize(rows[17:].clone())
    assert torch.equal(parts[1].plane(ROWWISE).operand_codes(), alone.plane(ROWWISE).operand_codes())
    assert torch.equal(parts[1].plane(ROWWISE).amax, alone.plane(ROWWISE).amax)


def test_quantizers_of_groups_are_copied_when_they_are_asked_for():
    """Where groups are quantized as a whole only the first is; a copy of a hybrid takes longer than a small group."""
    originals = [QUANTIZERS["mxfp8"]() for _ in range(3)]
    storing = splitting.Storing(originals, rowwise=True, columnwise=False)
    split_quantize(torch.randn(96, 64), [32, 32, 32], storing)
    assert list(storing._copies) == [0] and storing[0] is storing[0] is not originals[0]
    assert len(list(storing)) == 3 and all(q.internal and not q.columnwise_usage for q in storing)
    assert not any(q.internal for q in originals)


@pytest.mark.parametrize("splits", ["aligned", "ragged"])
def test_a_layer_quantizes_its_groups_together(splits, monkeypatch):
    """One call for x and one for dy, padding included."""
    calls = count_calls(monkeypatch)
    x, dy = inputs(splits)
    step(make(), x, MXFP8BlockScaling(), dy, m_splits=SPLITS[splits])
    assert len(calls) == 2


@pytest.mark.parametrize("save_original_input", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_operands_are_in_the_activations_dtype_before_they_are_quantized(hybrid, save_original_input, monkeypatch):
    """Also dy, and the input that wgrad quantizes again: fp32 inputs under torch.autocast are bf16 for all GEMMs."""
    seen = []
    quantize = cg.Quantizer.quantize
    monkeypatch.setattr(
        cg.Quantizer, "quantize", lambda self, t, **options: seen.append(t.dtype) or quantize(self, t, **options)
    )
    layer = make(save_original_input=save_original_input, params_dtype=torch.bfloat16)
    recipe = make_hybrid_recipe("mxfp8") if hybrid else make_recipe("mxfp8")
    x = inputs()[0].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), cg.autocast(recipe=recipe):
        y = layer(x, SPLITS["aligned"])
    y.backward(torch.randn_like(y))
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert set(seen) == {torch.bfloat16}


def test_quantizers_have_to_be_alike():
    asked = iter(range(100))

    def factory(role):
        if role is not None and role.tensor_type == "input":
            return QUANTIZERS["mxfp8" if next(asked) < 2 else "fp8"]()
        return QUANTIZERS["mxfp8"]()

    with pytest.raises(ValueError, match="input quantizers of expert 0 and expert 2 use incompatible"):
        step(make(), inputs()[0], recipes.CustomRecipe(qfactory=factory), m_splits=SPLITS["aligned"])


def test_roles():
    layer = make(name="experts")
    roles = layer.get_quantizer_roles(fwd=True, num_quantizers=9)
    assert [str(role) for role in roles[3:6]] == [
        "grouped_linear|input|experts",
        "grouped_linear|weight|experts",
        "None",
    ]
    assert len(layer.get_quantizer_roles(fwd=False, num_quantizers=6)) == 6
    with pytest.raises(ValueError, match="3 slots for each of 3 groups"):
        layer.get_quantizer_roles(fwd=True, num_quantizers=3)


# ---- weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_validation_changes_nothing(name, single):
    layer = check_validation_changes_nothing(
        lambda: make(single_grouped_weight=single), inputs, recipe_named(name), m_splits=SPLITS["aligned"]
    )
    assert len(layer._quantized_weights()) == (1 if single else 3)


@pytest.mark.parametrize("hybrid", [False, True])
def test_validation_would_change_something_if_it_dropped_usages(hybrid, monkeypatch):
    drop_usages_in_inference(monkeypatch)
    recipe = make_hybrid_recipe("mxfp8") if hybrid else make_recipe("mxfp8")
    with pytest.raises((AssertionError, RuntimeError)):
        check_validation_changes_nothing(make, inputs, recipe, m_splits=SPLITS["aligned"])


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "mxfp8_fwd_high_precision_bwd"])
def test_a_single_weight_is_as_many(name, quantized):
    """Formats whose scales are of a block make the same bytes of one parameter as of many."""
    recipe = recipe_named(name)
    with cg.quantized_model_init(enabled=quantized, recipe=recipe):
        torch.manual_seed(1)
        many = cg.GroupedLinear(3, 128, 128)
        torch.manual_seed(1)
        single = cg.GroupedLinear(3, 128, 128, single_grouped_weight=True, single_grouped_bias=True)
    assert isinstance(single.weight, cg.QuantizedTensor) == quantized
    x, dy = torch.randn(128, 128), torch.randn(128, 128)
    one = step(single, x, recipe, dy, m_splits=SPLITS["aligned"])
    other = step(many, x, recipe, dy, m_splits=SPLITS["aligned"])
    assert torch.equal(one["y"], other["y"]) and torch.equal(one["dx"], other["dx"])
    for name in ("weight", "bias"):
        assert torch.equal(one[f"d {name}"], torch.stack([other[f"d {name}{g}"] for g in range(3)]))


def test_a_single_weight_that_blocks_do_not_divide_is_not_kept_quantized():
    with (
        cg.quantized_model_init(recipe=make_recipe("fp8_block")),
        pytest.raises(ValueError, match="single weight of 2 groups cannot be kept quantized.*multiples of 128"),
    ):
        cg.GroupedLinear(2, 64, 96, single_grouped_weight=True)


def test_names_as_elsewhere():
    names = [f"{kind}{g}" for g in range(3) for kind in ("weight", "bias")]
    layer = make()
    step(layer, inputs()[0], MXFP8BlockScaling(), m_splits=SPLITS["aligned"])
    assert list(layer.state_dict()) == names
    assert list(make(single_grouped_weight=True, single_grouped_bias=True).state_dict()) == ["weight", "bias"]
    assert list(make(bias=False).state_dict()) == ["weight0", "weight1", "weight2"]


def test_histories_are_in_the_state_dict():
    layer, other = make(), make()
    x, dy = inputs()
    for _ in range(2):
        step(layer, x, make_recipe("fp8_delayed"), dy, m_splits=SPLITS["aligned"])
    other.load_state_dict(layer.state_dict())
    assert len(read_extra_state(layer.state_dict()["_extra_state"])["forward.scale"]) == 9
    assert_same(
        *(step(module, x, make_recipe("fp8_delayed"), dy, m_splits=SPLITS["aligned"]) for module in (layer, other))
    )


# ---- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("splits", ["aligned", "ragged", "empty"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_row_scaled_fwd_mxfp8_bwd"])
def test_options_of_linear_layers_work_here(name, splits, single):
    """Main gradients, weight gradients put off, inputs kept, weights cached: all as the plain step."""
    sizes, recipe = SPLITS[splits], recipe_named(name)
    x, dy = inputs(splits)
    plain = step(make(single_grouped_weight=single), x, recipe, dy, m_splits=sizes)

    late = make(single_grouped_weight=single, delay_wgrad_compute=True, save_original_input=True)
    first = step(late, x, recipe, dy, m_splits=sizes, is_first_microbatch=True)
    assert torch.equal(first["y"], plain["y"]) and torch.equal(first["dx"], plain["dx"])
    late.backward_dw()
    copies = {key: id(copy) for key, copy in late._fp8_workspaces.items()}
    step_again = {weight: getattr(late, weight).grad.clone() for weight in late.weight_names}
    x2 = x.clone().requires_grad_()
    with cg.autocast(recipe=recipe):
        late(x2, sizes, is_first_microbatch=False).backward(dy)
    late.backward_dw()
    assert copies == {key: id(copy) for key, copy in late._fp8_workspaces.items()} and len(copies) == 3

    fused = make(single_grouped_weight=single, fuse_wgrad_accumulation=True)
    for weight in fused.weight_names:
        getattr(fused, weight).main_grad = torch.ones(getattr(fused, weight).shape)
    result = step(fused, x, recipe, dy, m_splits=sizes)
    for weight in fused.weight_names:
        assert result[f"d {weight}"] is None
        assert torch.equal(step_again[weight], plain[f"d {weight}"])
        torch.testing.assert_close(getattr(late, weight).grad, 2 * plain[f"d {weight}"])
        torch.testing.assert_close(getattr(fused, weight).main_grad, plain[f"d {weight}"] + 1)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_main_grad_of_another_step_is_overwritten_also_by_empty_groups(single, delay):
    (x, dy), sizes = inputs("empty"), SPLITS["empty"]
    plain = step(make(single_grouped_weight=single), x, MXFP8BlockScaling(), dy, m_splits=sizes)
    layer = make(single_grouped_weight=single, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for name in layer.weight_names:
        weight = getattr(layer, name)
        weight.main_grad, weight.overwrite_main_grad = torch.full(weight.shape, float("nan")), True
    step(layer, x, MXFP8BlockScaling(), dy, m_splits=sizes)
    layer.backward_dw()
    for name in layer.weight_names:
        assert torch.equal(getattr(layer, name).main_grad, plain[f"d {name}"])


@pytest.mark.parametrize("single", [False, True])
def test_main_grad_has_to_be_there_and_is_announced(single):
    layer = make(single_grouped_weight=single, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match="main_grad"):
        step(layer, inputs()[0], MXFP8BlockScaling(), m_splits=SPLITS["aligned"])
    for name in layer.weight_names:
        weight = getattr(layer, name)
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    result = step(layer, inputs()[0], MXFP8BlockScaling(), m_splits=SPLITS["aligned"])
    for name in layer.weight_names:
        weight = getattr(layer, name)
        assert weight.grad_added_to_main_grad and weight.main_grad.any()
        assert result[f"d {name}"].shape == weight.shape and not result[f"d {name}"].any()


def test_a_group_that_was_empty_first_is_not_left_with_an_old_copy():
    layer = make()
    recipe = MXFP8BlockScaling()
    x, _ = inputs("empty")
    step(layer, x, recipe, m_splits=[64, 0, 0], is_first_microbatch=True)
    with torch.no_grad():
        layer.weight1.mul_(2)
    step(layer, x, recipe, m_splits=[64, 0, 0], is_first_microbatch=True)
    cached = step(layer, x, recipe, m_splits=[0, 64, 0], is_first_microbatch=False)
    assert torch.equal(cached["y"], step(layer, x, recipe, m_splits=[0, 64, 0])["y"])


def test_memory_of_the_caller():
    layer = make()
    x, dy = inputs()
    plain = step(layer, x, None, dy, m_splits=SPLITS["aligned"])
    out, dgrad_out = torch.empty(128, 128), torch.empty(128, 64)
    x.requires_grad_()
    y = layer(x, SPLITS["aligned"], out=out, dgrad_out=dgrad_out)
    y.backward(dy)
    assert y.data_ptr() == out.data_ptr() and torch.equal(out, plain["y"])
    assert torch.equal(dgrad_out, plain["dx"]) and torch.equal(x.grad, plain["dx"])


def test_bias_beside_the_output_and_frozen_parameters():
    layer = make(return_bias=True)
    y, biases = layer(inputs()[0], SPLITS["aligned"])
    assert biases[1] is layer.bias1 and y.requires_grad
    layer = make()
    layer.weight1.requires_grad_(False)
    x, dy = inputs()
    gradients = step(layer, x, MXFP8BlockScaling(), dy, m_splits=SPLITS["aligned"])
    assert gradients["d weight1"] is None and gradients["d weight0"] is not None


@pytest.mark.parametrize("single", [False, True])
def test_frozen_weights_and_inputs_that_need_no_gradient(single):
    """All groups are padded alike, whatever backward wants of each."""
    layer = make(single_grouped_weight=single, fuse_wgrad_accumulation=single)
    frozen = layer.weight_names[-1]
    getattr(layer, frozen).requires_grad_(False)
    getattr(layer, frozen).main_grad = torch.zeros(getattr(layer, frozen).shape)
    x, dy = inputs("ragged")
    with cg.autocast(recipe=MXFP8BlockScaling()):
        layer(x, SPLITS["ragged"]).backward(dy)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert gradients.pop(frozen) is None and all(gradient is not None for gradient in gradients.values())
    assert not getattr(layer, frozen).main_grad.any()


def test_double_cannot_be_quantized():
    layer = make(name="experts").double()
    with (
        cg.autocast(recipe=MXFP8BlockScaling()),
        pytest.raises(TypeError, match="experts: the weight is torch.float64"),
    ):
        layer(inputs()[0].double(), SPLITS["aligned"])


def test_gradients_in_double():
    layer = cg.GroupedLinear(2, 3, 2, params_dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, [1, 3]), (x, *layer.parameters()))


def test_calibration_quantizes_nothing():
    layer = make()
    x, _ = inputs("empty")
    with cg.autocast(enabled=False, calibrating=True, recipe=make_recipe("fp8_delayed")):
        assert torch.equal(layer(x, SPLITS["empty"]), make()(x, SPLITS["empty"]))


# ---- padding outside -----------------------------------------------------------------------------------


def test_padding_and_back():
    x = torch.randn(60, 8, requires_grad=True)
    padded, sizes = cg.Fp8Padding(3, 16)(x, [20, 7, 33])
    assert sizes == [32, 16, 48] and padded.shape == (96, 8)
    assert torch.equal(padded[:20], x[:20]) and not padded[20:32].any()
    back = cg.Fp8Unpadding(3, 16)(padded, [20, 7, 33])
    assert torch.equal(back, x)
    back.backward(x.detach())
    assert torch.equal(x.grad, x)
    with cg.autocast(recipe=MXFP8BlockScaling()):
        assert cg.Fp8Padding(2)(x, torch.tensor([20, 40]))[1] == [32, 64]


def test_padding_says_what_it_rounds_up_to():
    padding, unpadding = cg.Fp8Padding(2), cg.Fp8Unpadding(2, 16)
    for recipe, size in ((MXFP8BlockScaling(), 32), (CustomRecipe(qfactory=factories.mxfp8_factory), 128)):
        with cg.autocast(recipe=recipe):
            assert (padding.align_size, unpadding.align_size) == (size, 16)
    padding.align_size = 8
    assert padding(torch.randn(20, 8), [3, 17])[1] == [8, 24]


def test_padding_outside_changes_nothing():
    layer = make()
    x, dy = inputs("ragged")
    recipe = MXFP8BlockScaling()
    inside = step(layer, x, recipe, dy, m_splits=SPLITS["ragged"])

    class Padded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.named_parameters = layer.named_parameters

        def forward(self, x, m_splits):
            padded, sizes = cg.Fp8Padding(3, 32)(x, m_splits)
            return cg.Fp8Unpadding(3, 32)(layer(padded, sizes), m_splits)

    outside = step(Padded(), x, recipe, dy, m_splits=SPLITS["ragged"])
    assert_near(outside, inside, 1e-5)


def test_padding_follows_the_formats_of_the_layers():
    """One number for a recipe would pad the rows of MXFP8 and of high precision as if all were NVFP4."""
    layers = [cg.GroupedLinear(2, 64, 64, bias=False, name=name) for name in ("a", "b", "c")]
    recipe = cg.recipe.GemmRecipe.load("all: nvfp4; b: mxfp8; c: hp")
    with cg.autocast(recipe=recipe):
        assert [layer.row_multiple() for layer in layers] == [16, 32, 1]
        for used, size in ((layers[:1], 16), (layers[:2], 32), (layers[2:], 1), ((), 128)):
            assert cg.Fp8Padding(2, layers=used).align_size == size
        pad, unpad = cg.Fp8Padding(2, layers=layers[:2]), cg.Fp8Unpadding(2, layers=layers[:2])
        x = torch.randn(45, 64)
        padded, sizes = pad(x, [5, 40])
        assert sizes == [32, 64]
        assert torch.equal(unpad(padded, [5, 40]), x)
        assert torch.equal(unpad(layers[1](padded, sizes), [5, 40]), layers[1](x, [5, 40]))
    assert not list(pad.parameters()), "layers stay those of the caller"
    assert layers[0].row_multiple() == 1, "without a recipe"
    assert cg.Fp8Padding(2, 8, layers=layers).align_size == 8
    for groups, wrong in ((2, torch.nn.Linear(3, 3)), (3, layers[0])):
        with pytest.raises(ValueError, match=f"layers must be GroupedLinear with {groups} groups, got"):
            cg.Fp8Padding(groups, layers=[wrong])
