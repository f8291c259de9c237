"""Layers that run by plans give the bits of layers that do not, whatever happens to them."""

import gc
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain import kernels
from crossgrain.gemm import planned as planned_products
from crossgrain.gemm import product
from crossgrain.kernels.choice import using_backend
from crossgrain.kernels.cpu.products import has_byte_dot_products
from crossgrain.kernels.cpu.step_plans import StepPlan
from crossgrain.linear import function
from crossgrain.linear import planned as planned_steps
from crossgrain.linear.call import LinearCall
from crossgrain.linear.planned import NOT_PLANNED
from crossgrain.quantizers import observer
from crossgrain.runtime.random_numbers import DrawRecord

RECIPES = [
    "mxfp8",
    "nvfp4",
    "mxfp4(sr)",
    "fp8_block",
    "fp8",
    cg.recipe.Float8CurrentScaling(),
    cg.recipe.DelayedScaling(amax_history_len=2),
    "mxfp8-fwd-nvfp4-bwd",  # columns of weights are made of their rows
    "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)",
    "fprop: nvfp4, dgrad: mxfp8, wgrad: mxfp8",
    "fprop: mxfp8, dgrad: mxfp8, wgrad: fp8_block",
]
STOCHASTIC = cg.recipe.CustomRecipe(
    qfactory=lambda role: cg.FormatQuantizer("mxfp4", stochastic_rounding=role is None or role.tensor_type != "weight")
)
HALVES = ("forward_by_plan", "gradients_by_plan")


@pytest.fixture
def planned(monkeypatch):
    """How often each half of a step was planned since this was cleared, on a CPU that has no fast bf16 products."""
    counts = dict.fromkeys(HALVES, 0)
    cpu_with(monkeypatch, fast_bf16=False)

    def counting(name):
        real = getattr(function, name)

        def attempt(*arguments):
            made = real(*arguments)
            counts[name] += made.found is not None
            return made

        return attempt

    for name in HALVES:
        monkeypatch.setattr(function, name, counting(name))
    return counts


def cpu_with(monkeypatch, *, fast_bf16):
    for module in (product, planned_products):
        monkeypatch.setattr(module, "has_fast_bf16", lambda: fast_bf16)


def general_way(monkeypatch):
    for name in HALVES:
        monkeypatch.setattr(function, name, lambda *arguments: NOT_PLANNED)


def layer_and_data(shape=(64, 96, 160), dtype=torch.float32, bias=True):
    tokens, inputs, outputs = shape
    torch.manual_seed(5)
    layer = cg.Linear(inputs, outputs, bias=bias, params_dtype=dtype)
    x = torch.randn(2, tokens // 2, inputs).to(dtype).requires_grad_()
    return layer, x, torch.randn(2, tokens // 2, outputs).to(dtype)


def step(layer, x, dy, recipe, steps=2):
    """y, all gradients, and the next random number, after some steps."""
    with cg.autocast(recipe=recipe):
        for _ in range(steps):
            y = layer(x)
            y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters()), torch.randn(1)]


def same(found, wanted):
    return all(torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7)) for a, b in zip(found, wanted, strict=True))


def both_ways(monkeypatch, make, recipe):
    found = step(*make(), recipe)
    with monkeypatch.context() as patch:
        general_way(patch)
        wanted = step(*make(), recipe)
    return found, wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, pytest.param(STOCHASTIC, id="stochastic")])
def test_the_bits_are_those_of_the_general_way(recipe, dtype, planned, monkeypatch):
    for shape, bias in (((64, 96, 160), True), ((128, 256, 32), False)):
        planned.update(dict.fromkeys(HALVES, 0))
        found, wanted = both_ways(
            monkeypatch, lambda shape=shape, bias=bias: layer_and_data(shape, dtype, bias), recipe
        )
        assert same(found, wanted)
        decoded = "nvfp4" in str(recipe) and not has_byte_dot_products()
        assert decoded or planned == dict.fromkeys(HALVES, 2)


def test_operands_in_another_dtype_than_activations(planned, monkeypatch):
    """Weights in fp32, activations in bf16 by torch.autocast."""

    def run():
        layer, x, dy = layer_and_data()
        with torch.autocast("cpu", torch.bfloat16):
            return step(layer, x, dy.bfloat16(), "mxfp8")

    found = run()
    general_way(monkeypatch)
    assert same(found, run()) and found[0].dtype == torch.bfloat16 and found[2].dtype == torch.float32
    assert planned == dict.fromkeys(HALVES, 2)


@pytest.mark.parametrize("policy", ["propagate", "saturate"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["x", "weight", "dy"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", pytest.param(STOCHASTIC, id="stochastic")])
def test_numbers_that_are_not_finite_take_the_general_way_with_the_same_seeds(
    recipe, where, bad, policy, planned, monkeypatch
):
    def make():
        layer, x, dy = layer_and_data()
        with torch.no_grad():
            {"x": x, "weight": layer.weight, "dy": dy}[where].view(-1)[77] = bad
        return layer, x, dy

    with cg.settings.override(nonfinite=policy):
        found, wanted = both_ways(monkeypatch, make, recipe)
    assert same(found, wanted)
    assert planned["gradients_by_plan" if where == "dy" else "forward_by_plan"] == 0
    with cg.settings.override(nonfinite="raise"), pytest.raises(cg.NonfiniteError, match="row"):
        step(*make(), recipe)


def hybrid(row, column, source="original"):
    children = [cg.FormatQuantizer("mxfp4", stochastic_rounding=stochastic) for stochastic in (row, column)]
    options = {"rowwise_quantizer": children[0], "columnwise_quantizer": children[1], "columnwise_source": source}
    return cg.HybridQuantizer(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("which", ["input", "weight", "grad_output"])
def test_seeds_of_hybrids_are_drawn_as_in_the_general_way(which, source, dtype, planned, monkeypatch):
    """By as many draws, and for the same subjects, by which they are drawn with `draws_by_layer` and recorded."""
    for row, column in ((True, True), (True, False), (False, True)):

        def factory(role, row=row, column=column):
            mine = role is not None and role.tensor_type == which
            return hybrid(row, column, source) if mine else hybrid(False, False)

        recipe = cg.recipe.CustomRecipe(qfactory=factory)
        found, wanted = both_ways(monkeypatch, partial(layer_and_data, dtype=dtype), recipe)
        assert same(found, wanted)

        def recorded(recipe=recipe, by_layer=row):
            record = DrawRecord()
            with record.recording(), cg.draws_by_layer(seed=3) if by_layer else nullcontext():
                results = step(*layer_and_data(dtype=dtype), recipe)
            return results, record._seeds

        with_plans = recorded()
        with monkeypatch.context() as patch:
            general_way(patch)
            without = recorded()
        assert same(with_plans[0], without[0])
        assert with_plans[1] == without[1]


def test_an_input_that_is_refused_has_drawn_what_it_draws_in_the_general_way(monkeypatch):
    every = cg.recipe.CustomRecipe(qfactory=lambda role: cg.FormatQuantizer("mxfp4", stochastic_rounding=True))

    def next_number():
        layer, x, dy = layer_and_data()
        with torch.no_grad():
            x.view(-1)[77] = float("nan")
        with cg.settings.override(nonfinite="raise"), pytest.raises(cg.NonfiniteError):
            step(layer, x, dy, every)
        return torch.randn(1)

    found = next_number()
    general_way(monkeypatch)
    assert torch.equal(found, next_number())


def test_the_handler_of_a_signal_may_run_layers(monkeypatch):
    """Here it comes between decoding and multiplying, which it must not disturb."""
    layer, x, dy = layer_and_data()
    other, other_x, other_dy = layer_and_data((128, 256, 192))
    wanted = step(layer, x, dy, "mxfp8", steps=1)[:-1]
    inside, came = [], []

    def interrupted(real, *operands, **options):
        if not inside:
            inside.append(1)
            with torch.enable_grad():
                step(other, other_x, other_dy, "mxfp8", steps=1)
            came.append(inside.pop())
        return real(*operands, **options)

    for way in (lambda patch: None, general_way):
        with monkeypatch.context() as patch:
            way(patch)
            for name in ("mm", "addmm"):
                patch.setattr(torch, name, partial(interrupted, getattr(torch, name)))
            x.grad = None
            layer.zero_grad()
            assert same(step(layer, x, dy, "mxfp8", steps=1)[:-1], wanted)
    assert len(came) == 6


def test_a_call_without_a_quantizer_of_gradients_is_refused_as_in_the_general_way():
    layer, x, dy = layer_and_data()
    quantizers = [cg.quantizer_for("mxfp8") for _ in range(2)]
    y = function.linear(x, layer.weight, None, LinearCall(torch.float32, *quantizers))
    with pytest.raises(ValueError, match="grad_output rowwise"):
        y.backward(dy)


def test_a_checkpoint_recomputes_the_same_bits(planned):
    found = []
    for again in (False, True):
        layer, x, dy = layer_and_data()
        with cg.autocast(recipe=STOCHASTIC):
            y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            y.backward(dy)
        found.append([y.detach(), x.grad, layer.weight.grad])
    assert same(*found) and planned["forward_by_plan"] == 3


def test_whoever_looks_on_is_shown_planes(planned):
    layer, x, dy = layer_and_data()
    seen = []
    with observer.observe(seen.append):
        step(layer, x, dy, "mxfp8", steps=1)
    assert len(seen) == 3 and planned == dict.fromkeys(HALVES, 0)


def frozen(layer, x, dy):
    layer.weight.requires_grad_(False)


def no_gradient_of_x(layer, x, dy):
    x.requires_grad_(False)


def odd(layer, x, dy):
    x.data, dy.data = x.data[:, :-3], dy.data[:, :-3]


def strided(layer, x, dy):
    layer.weight.data = layer.weight.data.t().contiguous().t()


@pytest.mark.parametrize("change", [frozen, no_gradient_of_x, odd, strided])
def test_what_plans_are_not_for(change, planned, monkeypatch):
    def make():
        layer, x, dy = layer_and_data()
        change(layer, x, dy)
        return layer, x, dy

    def run():
        layer, x, dy = make()
        with cg.autocast(recipe=STOCHASTIC):
            y = layer(x)
        y.backward(dy)
        return [y.detach(), *(each for each in (x.grad, layer.weight.grad, layer.bias.grad) if each is not None)]

    found = run()
    assert planned["forward_by_plan"] == 0
    general_way(monkeypatch)
    assert same(found, run())


@pytest.mark.parametrize("options", [{"strict": True}, {"gemm_operand_dtype": torch.float32}])
def test_settings_that_ask_for_something_else(options, planned):
    with cg.settings.override(**options):
        step(*layer_and_data(), "mxfp8")
    assert planned == dict.fromkeys(HALVES, 0)


def test_fast_bf16_products_are_for_bf16_results_without_a_scale_to_apply(planned, monkeypatch):
    """`gemm` multiplies bf16 operands there, which plans do not; everything else is planned."""
    cpu_with(monkeypatch, fast_bf16=True)
    step(*layer_and_data(dtype=torch.bfloat16), "mxfp8")
    assert planned == dict.fromkeys(HALVES, 0)
    scaled_later = ["fp8", "nvfp4"] if has_byte_dot_products() else ["fp8"]
    for recipe, dtype in [("mxfp8", torch.float32), *((name, torch.bfloat16) for name in scaled_later)]:
        planned.update(dict.fromkeys(HALVES, 0))
        found, wanted = both_ways(monkeypatch, partial(layer_and_data, dtype=dtype), recipe)
        assert same(found, wanted) and planned == dict.fromkeys(HALVES, 2)


def test_a_weight_in_bf16_may_have_another_plan_than_one_in_fp32(planned, monkeypatch):
    """Where bf16 products are fast, gradients of bf16 weights are left to them. Both weights have one quantizer."""
    cpu_with(monkeypatch, fast_bf16=True)
    quantizers = {}
    recipe = cg.recipe.CustomRecipe(
        qfactory=lambda role: quantizers.setdefault(role and role.tensor_type, cg.MXFP8Quantizer(cg.DType.kFloat8E4M3))
    )
    for dtype, halves in ((torch.float32, 1), (torch.bfloat16, 0), (torch.float32, 1)):
        planned.update(dict.fromkeys(HALVES, 0))
        layer, x, dy = layer_and_data(dtype=dtype)
        step(layer, x.detach().float().requires_grad_(), dy.float(), recipe, steps=1)
        assert planned["gradients_by_plan"] == halves


@pytest.mark.parametrize("one_buffer", [True, False])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_amaxes_and_scales_are_recorded_as_in_the_general_way(one_buffer, power_of_two, planned, monkeypatch):
    recipe = cg.recipe.Float8CurrentScaling(use_power_2_scales=power_of_two)

    def recorded():
        layer, x, dy = layer_and_data()
        found = step(layer, x, dy * 3, recipe)
        quantizers = [each for group in layer.quantizers.values() for each in group if each is not None]
        assert sum(float(each.amax) != 0.0 for each in quantizers) == 3  # x, W and dy
        return [*found, *(number.clone() for each in quantizers for number in (each.amax, each.scale))]

    with cg.settings.override(non_tn_fp8_gemm=one_buffer):
        found = recorded()
        assert planned == dict.fromkeys(HALVES, 2)
        with monkeypatch.context() as patch:
            general_way(patch)
            wanted = recorded()
    assert same(found, wanted)


@pytest.mark.parametrize("one_buffer", [True, False])
def test_amaxes_of_delayed_scaling_are_recorded_as_in_the_general_way(one_buffer, planned, monkeypatch):
    """Each scale follows from the amaxes of the steps before."""

    def recorded():
        layer, x, dy = layer_and_data()
        recipe, found = cg.recipe.DelayedScaling(amax_history_len=2), []
        for factor in (1.0, 30.0, 0.1, 0.01):
            found += step(layer, x, dy * factor, recipe, steps=1)
            found += [number.clone() for state in layer.fp8_meta.values() for number in _numbers_of(state)]
        return found

    def _numbers_of(state):
        return [state.scale, state.amax_history] if hasattr(state, "amax_history") else []

    with cg.settings.override(non_tn_fp8_gemm=one_buffer):
        found = recorded()
        assert planned == dict.fromkeys(HALVES, 4) and len(found) > 4 * 4
        with monkeypatch.context() as patch:
            general_way(patch)
            wanted = recorded()
    assert same(found, wanted)


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_delayed_scales_that_are_no_positive_numbers_take_the_general_way(scale, planned, monkeypatch):
    def result():
        layer, x, _ = layer_and_data()
        with cg.autocast(recipe=cg.recipe.DelayedScaling()):
            layer(x)
        layer.quantizers["scaling_fwd"][0].scale.fill_(scale)
        planned.update(dict.fromkeys(HALVES, 0))
        with cg.autocast(recipe=cg.recipe.DelayedScaling()):
            return layer(x)

    found = result()
    assert planned["forward_by_plan"] == 0
    with monkeypatch.context() as patch:
        general_way(patch)
        wanted = result()
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.nan_to_num(), wanted.nan_to_num())


OWN_HOOKS = {
    "_given": {"_given": lambda self: (None, torch.tensor([0.5]))},
    "nothing observed": {"_observes": False},
    "_given, nothing observed": {"_given": lambda self: (None, torch.tensor([0.5])), "_observes": False},
    "gives_scales": {"gives_scales": False},
    "record": {"record": lambda self, name: None},
    "scale_for_step": {"scale_for_step": lambda self: torch.tensor([0.5])},
}


@pytest.mark.parametrize("of", ["class", "object"])
@pytest.mark.parametrize("hooks", OWN_HOOKS.values(), ids=OWN_HOOKS)
def test_delayed_scaling_in_which_a_user_has_replaced_something_takes_the_general_way(hooks, of, planned, monkeypatch):
    def results():
        made = []

        def factory(role):
            kind = type("Own", (cg.Float8Quantizer,), hooks if of == "class" else {})
            quantizer = kind(torch.tensor([0.01]), torch.zeros(1), cg.DType.kFloat8E4M3)
            if of == "object":
                for each, hook in hooks.items():
                    setattr(quantizer, each, partial(hook, quantizer) if callable(hook) else hook)
            made.append(quantizer)
            return quantizer

        found = step(*layer_and_data(), cg.recipe.CustomRecipe(qfactory=factory), steps=1)
        return [*found, *(quantizer.amax for quantizer in made)]

    found = results()
    assert planned == dict.fromkeys(HALVES, 0)
    general_way(monkeypatch)
    assert same(found, results())


@pytest.mark.parametrize(
    "amax", [torch.zeros(1, device="meta"), torch._neg_view(torch.zeros(1))], ids=["meta", "negative"]
)
def test_amaxes_that_cannot_be_written_are_refused_as_in_the_general_way(amax, planned):
    layer, x, _ = layer_and_data()
    recipe = cg.recipe.CustomRecipe(
        qfactory=lambda role: cg.Float8Quantizer(torch.tensor([2.0]), amax, cg.DType.kFloat8E4M3)
    )
    with pytest.raises(RuntimeError), cg.autocast(recipe=recipe):
        layer(x)
    assert planned["forward_by_plan"] == 0


@pytest.mark.parametrize(
    "alias", [lambda t: t, lambda t: t.view(1), torch.Tensor.detach], ids=["same", "view", "detached"]
)
def test_a_scale_in_the_memory_of_the_amax_takes_the_general_way(alias, planned, monkeypatch):
    def factory(role):
        both = torch.tensor([2.0])
        return cg.Float8Quantizer(both, alias(both), cg.DType.kFloat8E4M3)

    found, wanted = both_ways(monkeypatch, layer_and_data, cg.recipe.CustomRecipe(qfactory=factory))
    assert same(found, wanted) and planned == dict.fromkeys(HALVES, 0)


def test_a_scale_of_w_in_the_memory_of_the_amax_of_x_takes_the_general_way(planned, monkeypatch):
    def make():
        amax = torch.tensor([0.5])

        def factory(role):
            scale = amax if role is not None and role.tensor_type == "weight" else torch.tensor([2.0])
            mine = amax if role is not None and role.tensor_type == "input" else torch.zeros(1)
            return cg.Float8Quantizer(scale, mine, cg.DType.kFloat8E4M3)

        return cg.recipe.CustomRecipe(qfactory=factory)

    found = step(*layer_and_data(), make())
    assert planned["forward_by_plan"] == 0
    general_way(monkeypatch)
    assert same(found, step(*layer_and_data(), make()))


STATISTICS = {
    "narrow amax": (lambda: torch.tensor([2.0]), lambda: torch.zeros(1, dtype=torch.float16)),
    "sparse scale": (lambda: torch.tensor([2.0]).to_sparse(), lambda: torch.zeros(1)),
}


@pytest.mark.parametrize("statistics", STATISTICS.values(), ids=STATISTICS)
def test_unusual_scales_and_amaxes_take_the_general_way(statistics, planned, monkeypatch):
    """An amax beyond fp16 is infinite there."""

    def results():
        made = []

        def factory(role):
            made.append(cg.Float8Quantizer(*(make() for make in statistics), cg.DType.kFloat8E4M3))
            return made[-1]

        layer, x, dy = layer_and_data()
        with torch.no_grad():
            x *= 1e6
        found = step(layer, x, dy, cg.recipe.CustomRecipe(qfactory=factory), steps=1)
        return [*found, *(quantizer.amax for quantizer in made)]

    found = results()
    assert planned == dict.fromkeys(HALVES, 0)
    general_way(monkeypatch)
    assert same(found, results())


def test_without_a_scale_it_follows_from_the_matrix_as_in_the_general_way(planned, monkeypatch):
    def factory(role):
        quantizer = cg.Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), cg.DType.kFloat8E4M3)
        quantizer.scale = None
        return quantizer

    found, wanted = both_ways(monkeypatch, layer_and_data, cg.recipe.CustomRecipe(qfactory=factory))
    assert same(found, wanted) and planned == dict.fromkeys(HALVES, 0)


def test_scales_whose_product_is_beyond_fp32_take_the_general_way(planned, monkeypatch):
    def make():
        layer, x, dy = layer_and_data(bias=False)
        with torch.no_grad():
            layer.weight.mul_(2.0**90)
            x.mul_(2.0**90)
        return layer, x, dy

    found, wanted = both_ways(monkeypatch, make, cg.recipe.Float8CurrentScaling())
    assert same(found, wanted) and planned["forward_by_plan"] == 0


def test_columns_of_the_decoded_rows_of_fp8_have_their_scale(monkeypatch):
    """Where rows with one scale are decoded for a product, the scale is left out; columns are made with it."""

    def factory(role):
        children = {f"{way}_quantizer": cg.FormatQuantizer("fp8") for way in ("rowwise", "columnwise")}
        if role is None or role.tensor_type != "weight":
            return cg.HybridQuantizer(**children)
        return cg.HybridQuantizer(**children, columnwise_source="rowwise_dequantized")

    found, wanted = both_ways(monkeypatch, layer_and_data, cg.recipe.CustomRecipe(qfactory=factory))
    assert same(found, wanted)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", cg.recipe.Float8CurrentScaling()], ids=str)
def test_saved_planes_that_are_wrong_are_refused_by_the_backward_that_makes_a_plan(recipe):
    """What later ones must be like is taken from the planes of the first backward."""
    layer, x, dy = layer_and_data()
    halved = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[: len(t) // 2] if t.dim() == 2 else t)
    with halved, cg.autocast(recipe=recipe):
        y = layer(x)
    with pytest.raises(ValueError, match="columnwise"):
        y.backward(dy)


def test_a_saved_scale_of_another_dtype_is_refused():
    layer, x, dy = layer_and_data()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t.bfloat16() if t.dtype == torch.float32 else t
    )
    with hooks, cg.autocast(recipe=cg.recipe.Float8CurrentScaling()):
        y = layer(x)
    with pytest.raises(ValueError, match="scales of torch.float32"):
        y.backward(dy)


@pytest.mark.parametrize("where", ["_observe", "_observe_all", "static", "object", "later", "class"])
def test_whatever_observes_in_the_place_of_ours_is_called(where, planned, monkeypatch):
    seen = []

    class Own(cg.Float8CurrentScalingQuantizer):
        pass

    def factory(role):
        made = Own(cg.DType.kFloat8E4M3)
        if where == "object":
            made._observe = lambda targets: seen.append(targets)
        return made

    if where == "_observe":
        Own._observe = lambda self, targets: seen.append(targets)
    elif where == "static":
        Own._observe_all = staticmethod(lambda quantizers, targets: seen.append(targets))
    elif where == "_observe_all":
        Own._observe_all = classmethod(lambda cls, quantizers, targets: seen.append(targets))
    elif where == "class":
        watching = classmethod(lambda cls, quantizers, targets: seen.append(targets))
        monkeypatch.setattr(cg.Float8CurrentScalingQuantizer, "_observe_all", watching)
    layer, x, dy = layer_and_data()
    recipe = cg.recipe.CustomRecipe(qfactory=factory)
    step(layer, x, dy, recipe, steps=1)
    if where == "later":
        assert not seen and planned == dict.fromkeys(HALVES, 1)
        planned.update(dict.fromkeys(HALVES, 0))
        Own._observe = lambda self, targets: seen.append(targets)
        step(layer, x, dy, recipe, steps=1)
    assert len(seen) == 3 and planned == dict.fromkeys(HALVES, 0)


def test_amaxes_are_recorded_before_a_product_that_fails(planned, monkeypatch):
    layer, x, _ = layer_and_data()
    layer.bias = torch.nn.Parameter(torch.zeros(7))
    with pytest.raises(RuntimeError), cg.autocast(recipe=cg.recipe.Float8CurrentScaling()):
        layer(x)
    quantizers = [each for group in layer.quantizers.values() for each in group if each is not None]
    assert sum(float(each.amax) != 0.0 for each in quantizers) == 2  # x and W


def test_the_reference_has_no_plans_and_the_same_bits(planned):
    """Of planes: the sums of MXFP8 are those of torch in both."""
    found = step(*layer_and_data(), "mxfp8")
    assert planned == dict.fromkeys(HALVES, 2)
    with using_backend("reference"):
        assert same(found, step(*layer_and_data(), "mxfp8"))
    assert planned == dict.fromkeys(HALVES, 2)
    step(*layer_and_data(), "mxfp8")
    assert planned == dict.fromkeys(HALVES, 4)


def test_saved_tensors_that_hooks_replace(planned, monkeypatch):
    def run(unpack):
        layer, x, dy = layer_and_data()
        with cg.autocast(recipe="mxfp8"), torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
            y = layer(x)
        y.backward(dy)
        return [y.detach(), x.grad, layer.weight.grad]

    found = [run(unpack) for unpack in (torch.clone, lambda t: t.t().contiguous().t() if t.dim() == 2 else t)]
    assert planned == {"forward_by_plan": 2, "gradients_by_plan": 1}
    general_way(monkeypatch)
    wanted = run(torch.clone)
    assert all(same(each, wanted) for each in found)


def test_what_was_saved_and_then_written_is_noticed(planned):
    layer, x, dy = layer_and_data()
    with cg.autocast(recipe="mxfp8"):
        y = layer(x)
    saved = y.grad_fn.saved_tensors[0]
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_backward_can_run_twice(planned):
    layer, x, dy = layer_and_data()
    with cg.autocast(recipe="mxfp8"):
        y = layer(x)
    y.backward(dy, retain_graph=True)
    first = layer.weight.grad.clone()
    y.backward(dy)
    assert torch.equal(layer.weight.grad, first * 2) and planned["gradients_by_plan"] == 2


def test_results_do_not_share_memory_with_the_next_step():
    for dtype in (torch.float32, torch.bfloat16):
        layer, x, dy = layer_and_data(dtype=dtype)
        with cg.autocast(recipe="mxfp8"):
            y = layer(x)
            held = [y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)]
            copies = [each.clone() for each in held]
            other = layer(x.detach() * 5)
            torch.autograd.grad(layer((x * 3).detach().requires_grad_()), layer.weight, -dy)
        assert same(held, copies) and not torch.equal(other, held[0])


def test_an_option_that_changes_has_another_plan(planned):
    """The options of quantizers may be changed at any time."""
    layer, x, dy = layer_and_data()
    before = step(layer, x, dy, "mxfp8", steps=1)[0]
    (quantizer, *_), _ = layer.quantizers.values()
    quantizer.dtype = cg.DType.kFloat8E5M2
    after = step(layer, x, dy, "mxfp8", steps=1)[0]
    assert not torch.equal(before, after) and planned["forward_by_plan"] == 2


def test_what_a_user_puts_in_the_place_of_make_planes_is_called(planned, monkeypatch):
    layer, x, dy = layer_and_data()
    step(layer, x, dy, "mxfp8")
    planned.update(dict.fromkeys(HALVES, 0))
    (quantizer, *_), _ = layer.quantizers.values()
    asked, real = [], cg.MXFP8Quantizer.make_planes

    def make_planes(self, matrix, **directions):
        asked.append(directions)
        return real(self, matrix, **directions)

    quantizer.make_planes = partial(make_planes, quantizer)
    step(layer, x, dy, "mxfp8", steps=1)
    assert asked == [{"rowwise": True, "columnwise": True}] and planned["forward_by_plan"] == 0
    del quantizer.make_planes
    step(layer, x, dy, "mxfp8", steps=1)
    assert planned["forward_by_plan"] == 1
    monkeypatch.setattr(cg.MXFP8Quantizer, "make_planes", make_planes)
    step(layer, x, dy, "mxfp8", steps=1)
    assert len(asked) == 4 and planned["forward_by_plan"] == 1


def test_nothing_is_converted_for_a_plan_that_there_is_not(monkeypatch):
    """For given amaxes, and for what threads share: x and dy are converted once, by the general way."""
    converted = []
    monkeypatch.setattr(planned_steps, "_matrix", lambda *given: converted.append(given))
    amax = torch.tensor([3.0])
    given = {"use_existing_amax": True, "amax": amax}
    recipe = cg.recipe.CustomRecipe(
        qfactory=lambda role: cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3, **given)
    )
    step(*layer_and_data(), recipe)
    layer, x, dy = layer_and_data()
    monkeypatch.setattr(StepPlan, "is_for_one_thread", lambda plan: False)
    monkeypatch.setattr(kernels, "step_plan", lambda *given: StepPlan.__new__(StepPlan))
    step(layer, x, dy, "mxfp8")
    assert not converted


def test_threads_do_not_disturb_each_other(planned):
    shapes = [(64, 96, 160), (128, 256, 32), (32, 512, 64)]
    wanted = [step(*layer_and_data(shape), "mxfp8")[:-1] for shape in shapes]
    made = [layer_and_data(shape) for shape in shapes]
    wrong = []

    def work(number):
        layer, x, dy = made[number]
        for _ in range(20):
            x.grad = None
            layer.zero_grad()
            if not same(step(layer, x, dy, "mxfp8")[:-1], wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_plans_hold_no_activations(planned):
    tokens = 1312  # which no other test has
    layer, x, dy = layer_and_data((tokens, 64, 32))
    step(layer, x, dy, "nvfp4")
    del x, dy
    layer.zero_grad()
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    assert not [each.shape for each in tensors if {tokens, tokens // 2} & set(each.shape)]
    assert planned["forward_by_plan"] == 2 * has_byte_dot_products()


def test_plans_of_a_layer_are_bounded(planned):
    layer, _, _ = layer_and_data()
    for tokens in range(32, 32 * 40, 32):
        x = torch.randn(tokens, 96, requires_grad=True)
        with cg.autocast(recipe="mxfp8"):
            layer(x).sum().backward()
    (quantizer, *_), _ = layer.quantizers.values()
    assert 0 < len(quantizer._memo) <= 256
    layouts = [each for each in quantizer._memo.values() if hasattr(each, "step_plans")]
    assert all(len(each.step_plans) <= kernels._MOST_STEP_PLANS for each in layouts)
