"""NaNs and infinities in layers: they must not vanish in formats that cannot hold them."""

import copy

import pytest
import torch

import crossgrain as cg
from crossgrain.compat import transformer_engine
from crossgrain.quantizers.groups import quantize_groups
from crossgrain.quantizers.nonfinite import POLICIES
from crossgrain.recipe import CustomRecipe, GemmRecipe, MXFP8BlockScaling, NVFP4BlockScaling

from ..common.quantizers import QUANTIZERS, assert_same_bytes, hybrid_of

LINES = (
    "fp8",
    "all: fp8(delayed)",
    "fp8_block",
    "all: fp8_block(2d)",
    "mxfp8",
    "nvfp4",
    "all: nvfp4(4over6)",
    "all: nvfp4(row_scaled)",
    "mxfp4",
    "all: mxfp6_e3m2",
    "all: mxint8",
    "all: hifloat8",
    "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)",
    "fprop: nvfp4, dgrad: mxfp8, wgrad: mxfp8, input.source: dequantized, weight.source: dequantized",
    "fprop: nvfp4, dgrad: hp, wgrad: hp, backward_override: dequantized",
)
BAD = {"nan": torch.nan, "inf": torch.inf}
M, K, N = 128, 256, 128


def run(line, where=None, bad=torch.nan, layer=None, autocast=cg.autocast):
    """y, dx and dW of a layer with one bad number in x, W or dy."""
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((M, K), (N, K), (M, N)))
    if where is not None:
        {"x": x, "w": w, "dy": dy}[where][70, 3] = bad
    layer = layer or cg.Linear(K, N, bias=False, name="fc1")
    with torch.no_grad():
        layer.weight.copy_(w)
    x.requires_grad_()
    with autocast(recipe=line):
        y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dW": layer.weight.grad}


# What depends on number (70, 3) of each operand: a row or a column of the result.
DEPENDS = {
    "x": {"y": (70, slice(None)), "dW": (slice(None), 3)},
    "w": {"y": (slice(None), 70), "dx": (slice(None), 3)},
    "dy": {"dx": (70, slice(None)), "dW": (3, slice(None))},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("where", DEPENDS)
@pytest.mark.parametrize("line", LINES)
def test_whatever_depends_on_it_is_not_finite_and_the_rest_is(line, where, bad):
    results = run(line, where, bad)
    for name, result in results.items():
        if name in DEPENDS[where]:
            assert not result[DEPENDS[where][name]].isfinite().any()
        else:
            assert result.isfinite().all()


@pytest.mark.parametrize("line", ["fp8_block", "nvfp4", "mxfp4"])
def test_other_rows_stay_as_they_are(line):
    clean, dirty = run(line)["y"], run(line, "x", torch.nan)["y"]
    others = torch.arange(M) != 70
    assert torch.equal(clean[others], dirty[others])


@pytest.mark.parametrize("choose", ["settings", "strict", "recipe", "rule"])
def test_saturate_gives_finite_numbers_as_before(choose):
    line = {"recipe": "all: nvfp4, nonfinite: saturate", "rule": "all: nvfp4; fc1: nonfinite: saturate"}.get(
        choose, "all: nvfp4"
    )
    chosen = {"settings": {"nonfinite": "saturate"}, "strict": {"strict": True}}.get(choose, {})
    with cg.settings.override(**chosen):
        assert all(result.isfinite().all() for result in run(line, "x", torch.nan).values())


def test_what_a_recipe_says_is_stronger_than_settings_and_strict_mode():
    with cg.settings.override(strict=True, nonfinite="saturate"):
        assert run("all: nvfp4, nonfinite: propagate", "x", torch.nan)["y"].isnan().any()


def test_settings_count_when_the_layer_runs():
    layer = cg.Linear(K, N, bias=False)
    assert run("nvfp4", "x", layer=layer)["y"].isnan().any()
    with cg.settings.override(nonfinite="saturate"):
        assert run("nvfp4", "x", layer=layer)["y"].isfinite().all()
    assert run("nvfp4", "x", layer=layer)["y"].isnan().any()


def test_an_autocast_of_transformer_engine_saturates_and_another_one_does_not():
    te, layer = transformer_engine.pytorch, cg.Linear(K, N, bias=False)
    for _ in range(2):
        assert run(MXFP8BlockScaling(), "x", torch.inf, layer, te.autocast)["y"][70].isinf().any()  # holds it
        assert run(NVFP4BlockScaling(), "x", torch.nan, layer, te.autocast)["y"].isfinite().all()
        assert run(NVFP4BlockScaling(), "x", torch.nan, layer)["y"][70].isnan().all()
    assert run(NVFP4BlockScaling(nonfinite="propagate"), "x", torch.nan, layer, te.autocast)["y"].isnan().any()
    with pytest.warns(DeprecationWarning, match="use autocast"):
        assert isinstance(te.fp8_autocast(), te.autocast)


@pytest.mark.parametrize("where", DEPENDS)
@pytest.mark.parametrize("line", ["fp8", "mxfp8", "nvfp4", "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4", "all: mxint8"])
def test_raise_names_the_layer_the_tensor_and_the_place(line, where):
    tensor = {"x": "input", "w": "weight", "dy": "grad_output"}[where]
    with cg.settings.override(nonfinite="raise"):
        run(line)
        with pytest.raises(
            cg.NonfiniteError,
            match=rf"fc1, {tensor}: 1 of \d+ numbers are NaN or infinite. The first is -?(nan|inf) in row 70, column 3",
        ) as caught:
            run(line, where, torch.inf)
    assert "rowwise as" in str(caught.value) or "columnwise as" in str(caught.value)


def test_raise_tells_the_step():
    layer, x = cg.Linear(K, N, name="fc"), torch.randn(M, K)
    steps = []
    for _ in range(2):
        with cg.autocast(recipe="mxfp8, nonfinite: raise"):
            layer(x)
            with pytest.raises(cg.NonfiniteError, match=r"in step \d+\.") as caught:
                layer(x * torch.inf)
        steps.append(int(str(caught.value).partition("in step ")[2].partition(".")[0]))
    assert steps[1] == steps[0] + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_rules_say_it_for_one_layer(policy):
    recipe = GemmRecipe.load(f"nvfp4; fc2: nonfinite: {policy}")
    assert GemmRecipe.load(str(recipe)) == GemmRecipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.nonfinite is None
    assert recipe.nonfinite_of("fc2", "linear") == policy
    assert recipe.nonfinite_of("fc1", "linear") is None
    assert f"nonfinite: {policy}" in str(recipe.explain())


@pytest.mark.parametrize(
    "make",
    [
        lambda: GemmRecipe.load("nvfp4, nonfinite: ignore"),
        lambda: GemmRecipe("mxfp8", "mxfp8", "mxfp8", nonfinite="ignore"),
        lambda: MXFP8BlockScaling(nonfinite="ignore"),
        lambda: setattr(cg.settings, "nonfinite", "ignore"),
    ],
)
def test_other_policies_are_refused(make):
    with pytest.raises(ValueError, match=r"propagate.*raise.*saturate"):
        make()


# ---- quantizers, groups, kept weights ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if "sr" not in name])
def test_a_quantizer_by_itself_keeps_the_bytes_of_the_format(name):
    x = torch.randn(128, 128)
    x[3, 4], x[90, 100] = torch.nan, torch.inf
    plain, watched = QUANTIZERS[name](), QUANTIZERS[name]()
    assert plain.nonfinite == "saturate"
    watched.nonfinite = "saturate"
    assert_same_bytes(plain.quantize(x), watched.quantize(x)) if "identity" not in name else None
    watched.nonfinite = "propagate"
    decoded = watched.quantize(x).dequantize()
    assert not decoded[3, 4].isfinite()
    assert not decoded[90, 100].isfinite()


def test_a_policy_of_a_factory_is_kept():
    def factory(role):
        quantizer = cg.NVFP4Quantizer()
        quantizer.nonfinite = "saturate"
        return quantizer

    assert run(CustomRecipe(qfactory=factory), "x")["y"].isfinite().all()
    assert run(CustomRecipe(qfactory=lambda role: cg.NVFP4Quantizer()), "x")["y"][70].isnan().all()


@pytest.mark.parametrize(
    "make",
    [QUANTIZERS[name] for name in ("nvfp4", "fp8", "mxfp4", "fp8_block", "nvfp4_rht")]
    + [lambda: hybrid_of("mxfp8", "nvfp4"), lambda: hybrid_of("identity", "nvfp4")],
)
def test_only_the_group_with_the_number_is_marked(make):
    rows, sizes = torch.randn(160, 128), [64, 0, 96]
    rows[70, 3] = torch.nan
    rows[75, 9] = torch.inf
    quantizers = [make() for _ in sizes]
    for quantizer in quantizers:
        for plain in quantizer.plain_quantizers():
            plain.nonfinite = "propagate"
    first, _, last = quantize_groups(rows, sizes, quantizers)
    alone = quantizers[2].copy().quantize(rows[64:])
    assert all(first.dequantize(direction=plane.direction).isfinite().all() for plane in first.planes())
    for plane in last.planes():
        decoded = last.dequantize(direction=plane.direction)
        assert not decoded[6, 3].isfinite()
        assert not decoded[11, 9].isfinite()
    assert_same_bytes(last, alone) if not isinstance(make(), cg.HybridQuantizer) else None
    for quantizer in quantizers:
        for plain in quantizer.plain_quantizers():
            plain.nonfinite = "raise"
    with pytest.raises(cg.NonfiniteError, match="row 70, column 3"):
        quantize_groups(rows, sizes, quantizers)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("line", ["nvfp4", "fp8", "mxfp4", "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4"])
def test_a_weight_that_is_kept_quantized_keeps_what_an_optimizer_wrote(line, bad):
    with cg.quantized_model_init(recipe=line):
        layer = cg.Linear(K, N, bias=False)
    x = torch.randn(M, K)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with cg.autocast(recipe=line):
        assert layer(x).isfinite().all()
    grad = torch.zeros(N, K)
    grad[70, 3] = bad
    layer.weight.grad = grad
    optimizer.step()
    loaded = cg.Linear(K, N, bias=False)
    loaded.load_state_dict({"weight": layer.weight.dequantize()}, strict=False)
    for each in (layer, loaded, copy.deepcopy(layer)):
        with cg.autocast(recipe=line):
            assert not each(x)[:, 70].isfinite().any()


@pytest.mark.parametrize("line", ["nvfp4", "fp8"])
def test_grouped_layers_spoil_only_the_expert(line):
    layer = cg.GroupedLinear(2, K, N, bias=False)
    x = torch.randn(128, K, requires_grad=True)
    with torch.no_grad():
        x[70, 3] = torch.nan
    with cg.autocast(recipe=line):
        y = layer(x, [64, 64])
    y.backward(torch.ones_like(y))
    assert y[:64].isfinite().all()
    assert y[70].isnan().all()
    assert layer.weight0.grad.isfinite().all()
    assert layer.weight1.grad[:, 3].isnan().all()


@pytest.mark.parametrize("line", ["nvfp4", "fp8", "mxfp8", "columns of rows"])
@pytest.mark.parametrize("of", ["input", "grad_output"])
def test_grouped_layers_name_the_row_of_the_user(line, of):
    """Groups are padded to whole blocks before they are quantized, which nobody who reads the message knows."""
    if line == "columns of rows":
        line = cg.recipe.CustomRecipe(lambda role: hybrid_of("mxfp8", "mxfp8", "rowwise_dequantized"))
    layer = cg.GroupedLinear(2, K, N, bias=False)
    x, dy = torch.randn(21, K, requires_grad=True), torch.randn(21, N)
    with torch.no_grad():
        (x if of == "input" else dy)[13, 3] = torch.nan
    count = 21 * (K if of == "input" else N)
    with (
        pytest.raises(cg.NonfiniteError, match=rf"1 of {count} numbers .* nan in row 13, column 3"),
        cg.settings.override(nonfinite="raise"),
        cg.autocast(recipe=line),
    ):
        layer(x, [10, 11]).backward(dy)


@pytest.mark.parametrize("line", ["nvfp4", "fp8_block"])
def test_a_loss_scaler_sees_an_overflow(line):
    layer = cg.Linear(K, N, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = layer.weight.detach().clone()
    with cg.autocast(recipe=line):
        loss = (layer(torch.randn(M, K)) * 1e3).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() < 2.0**127


def test_compiled_layers_too():
    layer = cg.Linear(K, N, bias=False, name="fc1")
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(M, K, requires_grad=True)
    with torch.no_grad():
        x[70, 3] = torch.nan
    with cg.autocast(recipe="nvfp4"):
        y = compiled(x)
    y.sum().backward()
    assert y[70].isnan().all()
    assert layer.weight.grad[:, 3].isnan().all()
