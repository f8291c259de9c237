"""GroupedLinear on rows that come quantized: they are multiplied as they are, and columns are made from them."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE
from crossgrain import recipe as recipes
from crossgrain.gemm import gemm
from crossgrain.linear import split_quantize
from crossgrain.recipe import as_recipe, read_extra_state

from ..common.planes import normal
from ..common.quantizers import QUANTIZERS
from ..common.recomputation import delayed_columns_of_rows

SIZES = [20, 0, 7, 33]
DERIVED = {
    "mxfp8": "mxfp8, input.source: dequantized",
    "fp8_block": "fp8-block, input.source: dequantized",
    "nvfp4_row_scaled": "nvfp4-fwd-mxfp8-bwd",
    "nvfp4": "nvfp4-plain, input.source: dequantized",
    "mxfp8 and nvfp4": "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4(rht), input.source: dequantized",
    "mxfp8, backward on decoded rows": "mxfp8, backward_override: dequantized",
    "fp8": "fp8",
}
ONE_SCALE = ("fp8", "nvfp4")  # for a tensor: that of all rows is not that of each group


def make():
    torch.manual_seed(1)
    return cg.GroupedLinear(len(SIZES), 64, 128)


def as_tensor(x, quantizer):
    """``x`` as it would be sent to a layer."""
    if isinstance(quantizer, cg.HybridQuantizer):
        quantizer = quantizer.rowwise_quantizer
    quantizer = quantizer.copy()
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer(x)


def step(layer, x, dy, recipe, quantized):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with cg.autocast(recipe=as_recipe(recipe)):
        y = layer(as_tensor(x, layer.token_quantizer()) if quantized else x, SIZES)
    y.backward(dy)
    gradients = [getattr(layer, name).grad.clone() for name in (*layer.weight_names, *layer.bias_names)]
    return [y.detach(), x.grad, *gradients]


@pytest.mark.parametrize("name", [name for name in DERIVED if name not in ONE_SCALE])
def test_rows_with_scales_of_their_own_give_what_the_layer_makes_of_plain_ones(name):
    layer, x, dy = make(), normal(60, 64), normal(60, 128, seed=1)
    plain = step(layer, x, dy, DERIVED[name], quantized=False)
    quantized = step(layer, x, dy, DERIVED[name], quantized=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, quantized, strict=True))


def filled_up(matrix):
    """With zeros below, to whole blocks of any format."""
    return torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % 128))


def columns_by_hand(rows, x, own, quantizer):
    """The columnwise plane of some rows: of what they decode to, or, of the same codes, from ``x`` again."""
    if isinstance(quantizer, cg.HybridQuantizer):
        return quantizer.columnwise_quantizer(filled_up(rows.dequantize()[own])).plane(COLUMNWISE)
    alike = cg.Float8CurrentScalingQuantizer(quantizer.dtype, use_existing_amax=True, amax=x.abs().max().view(1))
    return alike(filled_up(x[own])).plane(COLUMNWISE)


@pytest.mark.parametrize("name", DERIVED)
def test_rows_are_multiplied_as_they_are(name, monkeypatch):
    """y and dW by hand, from the rows that came and from columns of what they decode to."""
    layer, x, dy = make(), normal(60, 64), normal(60, 128, seed=1)
    made = []
    quantize = split_quantize.split_quantize
    monkeypatch.setattr(split_quantize, "split_quantize", lambda *args: made.append(args) or quantize(*args))
    with cg.autocast(recipe=as_recipe(DERIVED[name])):
        rows = as_tensor(x, layer.token_quantizer())
        y = layer(rows, SIZES)
        assert not made, "the input is not quantized again"
        layer(x, SIZES)
        assert len(made) == 1, "as it would be"
        quantizers = layer._build_quantizers(layer._recipe_in_force()).details[0]
    y.backward(dy)
    start = 0
    for g, size in enumerate(SIZES):
        own = slice(start, start + size)
        parameter = getattr(layer, f"weight{g}")
        weight = quantizers.weight.storing(rowwise=True, columnwise=False)(parameter.detach())
        plane = rows._sliced(0, start, start + size).plane(ROWWISE)
        assert torch.equal(y[own], gemm("fprop", plane, weight.plane(ROWWISE), out_dtype=torch.float32))
        if size and as_recipe(DERIVED[name]).backward_override is None:
            columns = columns_by_hand(rows, x, own, quantizers.input)
            gradient = quantizers.grad_output.storing(rowwise=False, columnwise=True)(filled_up(dy[own]))
            dw = gemm("wgrad", gradient.plane(COLUMNWISE), columns, out_dtype=torch.float32)
            assert torch.equal(parameter.grad, dw)
        start += size


def test_formats_the_layer_would_not_use_are_decoded():
    layer, x = make(), normal(60, 64)
    for quantizer in (cg.NVFP4Quantizer(columnwise=False), QUANTIZERS["identity"]()):
        with cg.autocast(recipe=as_recipe("mxfp8")):
            assert torch.equal(layer(quantizer(x), SIZES), layer(quantizer(x).dequantize(), SIZES))
    both = cg.quantize(normal(64, 64), "mxfp8")
    with cg.autocast(recipe=as_recipe("mxfp8")):
        assert torch.equal(layer(both, [32, 0, 32, 0]), layer(both.dequantize(), [32, 0, 32, 0]))
    assert torch.equal(layer(both, [32, 0, 32, 0]), layer(both.dequantize(), [32, 0, 32, 0])), "without a recipe"


@pytest.mark.parametrize("recomputation", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_histories_learn_what_they_would_of_plain_rows(recomputation):
    """Those of columns that are made from decoded rows, also where the first pass makes no columns."""
    recipe, found = recipes.CustomRecipe(qfactory=delayed_columns_of_rows), []
    for quantized in (False, True):
        layer, x = make(), normal(60, 64).requires_grad_()

        def run(x, layer=layer, quantized=quantized):
            return layer(as_tensor(x, layer.token_quantizer()) if quantized else x, SIZES)

        results = []
        for factor in (1.0, 3.0):
            with cg.autocast(recipe=recipe):
                y = run(x * factor) if recomputation is None else cg.checkpoint(run, x * factor, **recomputation)
            y.square().sum().backward()
            results.append(y.detach())
        learned = [
            value for value in read_extra_state(layer.get_extra_state()).values() if isinstance(value, torch.Tensor)
        ]
        found.append([*results, x.grad, *learned, *(getattr(layer, name).grad for name in layer.weight_names)])
        assert any(history.count_nonzero() > 2 for history in learned)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe, reason",
    [
        ("mxfp8", "'input.source: dequantized'"),
        ("fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4", "'input.source: dequantized'"),
        ("mxfp8, backward_override: high_precision", "backward_override='high_precision'"),
    ],
)
def test_columns_of_the_original_are_not_made_from_rows(recipe, reason):
    layer, rows = make(), cg.quantize(normal(60, 64), "mxfp8", columnwise=False)
    with cg.autocast(recipe=as_recipe(recipe)):
        with pytest.raises(ValueError, match=f"GroupedLinear: the input cannot be sent .* {reason}"):
            layer.token_quantizer()
        with pytest.raises(ValueError, match=rf"input \[60, 64\] has only a rowwise mxfp8 plane, .*{reason}"):
            layer(rows, SIZES)
        with torch.no_grad():
            assert layer.token_quantizer() is not None
            assert torch.equal(layer(rows, SIZES), layer(rows.dequantize(), SIZES)), "which are the same in MXFP8"
        for name in layer.weight_names:
            getattr(layer, name).requires_grad_(False)
        assert layer.token_quantizer() is not None and layer(rows, SIZES).requires_grad


def test_the_original_cannot_be_saved():
    torch.manual_seed(1)
    layer = cg.GroupedLinear(2, 64, 64, save_original_input=True)
    with cg.autocast(recipe=as_recipe(DERIVED["mxfp8"])):
        with pytest.raises(ValueError, match="save_original_input keeps the input in high precision"):
            layer.token_quantizer()
        with pytest.raises(ValueError, match="save_original_input keeps the input in high precision"):
            layer(cg.quantize(normal(8, 64), "mxfp8", columnwise=False), [4, 4])


def test_quantized_rows_are_not_made_longer():
    layer = cg.GroupedLinear(1, 48, 64)
    recipe = "fprop: nvfp4, dgrad: mxfp8(2d), wgrad: nvfp4"  # tiles of the weight are wider than blocks of the input
    with cg.autocast(recipe=as_recipe(f"{recipe}, input.source: dequantized")):
        rows = as_tensor(normal(8, 48), layer.token_quantizer())
        with pytest.raises(
            ValueError, match=r"input \[8, 48\] is already quantized and cannot be padded to 64 columns"
        ):
            layer(rows, [8])


def test_tokens_stay_as_they_are_where_the_layer_reads_them_so():
    layer = make()
    assert layer.token_quantizer() is None
    with cg.autocast(recipe=as_recipe("hp-fwd-mxfp8-bwd")):
        assert layer.token_quantizer() is None
    with cg.autocast(enabled=False, calibrating=True, recipe=as_recipe("mxfp8")):
        assert layer.token_quantizer() is None
