"""What Linear computes under each recipe: hybrid equals plain, each GEMM has its own formats, pairs are checked."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, DType
from crossgrain import recipe as recipes
from crossgrain.gemm import gemm
from crossgrain.gemm.operands import GEMMS
from crossgrain.recipe import factories

from ..common.families import PLAIN, Step, assert_same_step, make_hybrid_recipe, make_recipe, reference, run, sizes
from ..common.quantizers import QUANTIZERS

RESULT_OF = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}


# ---- hybrid(F, F) is F --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 64, 96), (20, 80, 48)], ids=["whole", "padded"])
@pytest.mark.parametrize("family", PLAIN)
def test_hybrid_of_one_format_is_bitwise_that_format(family, shape, dtype):
    """Output and all gradients over three steps, with rotation, stochastic rounding and histories."""
    m, k, n = shape
    results = {}
    for kind, recipe in {"plain": make_recipe(family), "hybrid": make_hybrid_recipe(family)}.items():
        torch.manual_seed(3)
        layer = cg.Linear(k, n, params_dtype=dtype)
        steps = []
        for step in range(3):
            x, dy = sizes(m, k, n, dtype)
            steps.append(run(layer, x * (1 + step), recipe, dy))
        results[kind] = steps
    for plain, hybrid in zip(results["plain"], results["hybrid"], strict=True):
        assert_same_step(plain, hybrid)


def test_stochastic_rounding_is_really_at_work():
    """The test above would be empty if the recipe rounded to nearest."""
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    first, second = (run(layer, x, recipes.NVFP4BlockScaling(), dy) for _ in range(2))
    assert torch.equal(first.y, second.y) and not torch.equal(first.dw, second.dw)


@pytest.mark.parametrize("family", [name for name in PLAIN if name != "identity"])
def test_near_high_precision_and_not_equal_to_it(family):
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    recipe = make_recipe(family)
    for _ in range(3):
        step = run(layer, x, recipe, dy)
    for mine, exact in zip(step, reference(layer, x, dy), strict=True):
        error = (mine - exact).norm() / exact.norm()
        assert error < (0.3 if family == "nvfp4" else 0.06)
    assert not torch.equal(step.y, reference(layer, x, dy).y)


def test_identity_is_high_precision():
    layer = cg.Linear(20, 12)
    x, dy = sizes(7, 20, 12)
    recipe = make_recipe("identity")
    for mine, exact in zip(run(layer, x, recipe, dy), reference(layer, x, dy), strict=True):
        torch.testing.assert_close(mine, exact)


# ---- each GEMM its own format -------------------------------------------------------------------------

TRIPLES = [("fp8", "mxfp8", "nvfp4"), ("nvfp4", "fp8", "mxfp8"), ("mxfp8", "identity", "fp8_block")]


def per_gemm(fprop, dgrad, wgrad):
    """A factory that gives each GEMM its own format."""
    formats = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    wanted = {}
    for which, operands in GEMMS.items():
        for tensor, direction in operands.items():
            wanted[tensor, direction] = formats[which]

    def factory(role):
        tensor = role.tensor_type if role is not None else "input"
        return cg.HybridQuantizer(
            rowwise_quantizer=QUANTIZERS[wanted[tensor, ROWWISE]](),
            columnwise_quantizer=QUANTIZERS[wanted[tensor, COLUMNWISE]](),
        )

    return factory


@pytest.mark.parametrize("formats", [*TRIPLES, *(triple[::-1] for triple in TRIPLES)], ids="-".join)
def test_three_formats(formats):
    """Each result is that of the layer whose three GEMMs all have the format of this one."""
    layer = cg.Linear(64, 96)
    x, dy = sizes(64)
    mixed = run(layer, x, recipes.CustomRecipe(qfactory=per_gemm(*formats)), dy)
    for name, fmt in zip(("y", "dx", "dw"), formats, strict=True):
        alone = run(layer, x, recipes.CustomRecipe(qfactory=per_gemm(fmt, fmt, fmt)), dy)
        assert torch.equal(getattr(mixed, name), getattr(alone, name)), name


def test_three_formats_against_gemms_by_hand():
    layer = cg.Linear(64, 96, bias=False)
    x, dy = sizes()
    step = run(layer, x, recipes.CustomRecipe(qfactory=per_gemm("fp8", "mxfp8", "nvfp4")), dy)
    tensors = {"input": x.detach(), "weight": layer.weight.detach(), "grad_output": dy}
    for which, fmt in {"fprop": "fp8", "dgrad": "mxfp8", "wgrad": "nvfp4"}.items():
        planes = [QUANTIZERS[fmt]()(tensors[t]).plane(direction) for t, direction in GEMMS[which].items()]
        assert torch.equal(getattr(step, RESULT_OF[which]), gemm(which, *planes))


# ---- the right plane ----------------------------------------------------------------------------------


def poisoning(cls, tensor_type, direction):
    """A quantizer class whose results have NaN codes in one direction."""

    class Poisoning(cls):
        def quantize_impl(self, tensor):
            made = super().quantize_impl(tensor)
            plane = made.plane(direction)
            if plane is not None:
                plane.data.fill_(0x7F)  # NaN in E4M3
            return made

    return Poisoning


def mxfp8_but_poisoned(tensor, direction, hybrid):
    def factory(role):
        mine = role is not None and role.tensor_type == tensor
        if not hybrid:
            cls = poisoning(cg.MXFP8Quantizer, tensor, direction) if mine else cg.MXFP8Quantizer
            return cls(DType.kFloat8E4M3)
        cls = poisoning(cg.HybridQuantizer, tensor, direction) if mine else cg.HybridQuantizer
        row, column = cg.MXFP8Quantizer(DType.kFloat8E4M3), cg.MXFP8Quantizer(DType.kFloat8E4M3)
        return cls(rowwise_quantizer=row, columnwise_quantizer=column)

    return recipes.CustomRecipe(qfactory=factory)


@pytest.mark.parametrize("quantized_weight", [False, True], ids=["", "quantized_weight"])
@pytest.mark.parametrize("cached", [None, True], ids=["", "cached"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["plain", "hybrid"])
@pytest.mark.parametrize("which, tensor", [(which, t) for which in GEMMS for t in GEMMS[which]])
def test_garbage_in_a_plane_reaches_only_the_gemm_that_reads_it(which, tensor, hybrid, cached, quantized_weight):
    """Six planes, each poisoned in turn: one result is NaN, the other two are bitwise untouched."""
    direction = GEMMS[which][tensor]
    torch.manual_seed(0)
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    clean = run(layer, x, recipes.MXFP8BlockScaling(), dy)
    poisoned = mxfp8_but_poisoned(tensor, direction, hybrid)
    if quantized_weight:
        value = layer.weight.detach().clone()
        with cg.quantized_model_init(recipe=poisoned):
            layer = cg.Linear(64, 96, init_method=lambda weight: weight.copy_(value))
    step = run(layer, x, poisoned, dy, is_first_microbatch=cached)
    for other, name in RESULT_OF.items():
        if other == which:
            assert getattr(step, name).isnan().all()
        else:
            assert torch.equal(getattr(step, name), getattr(clean, name)), f"{tensor} {direction} reached {other}"


# ---- pairs --------------------------------------------------------------------------------------------


def mismatched(which, tensor):
    """MXFP8 everywhere but in one plane."""

    def factory(role):
        children = {}
        for direction in (ROWWISE, COLUMNWISE):
            other = role is not None and role.tensor_type == tensor and GEMMS[which].get(tensor) is direction
            children[f"{direction.value}_quantizer"] = QUANTIZERS["nvfp4" if other else "mxfp8"]()
        return cg.HybridQuantizer(**children)

    return factory


@pytest.mark.parametrize("which, tensor", [(which, t) for which in GEMMS for t in GEMMS[which]])
def test_operands_that_do_not_pair_are_refused_before_the_first_step(which, tensor):
    layer = cg.Linear(64, 96, name="decoder.fc1")
    x, dy = sizes()
    good = recipes.MXFP8BlockScaling()
    before = run(layer, x, good, dy)
    state = (layer.quantizers, layer._built, layer.fp8, dict(layer.fp8_meta), layer.state_dict())
    rng = torch.get_rng_state()
    recipe = recipes.CustomRecipe(qfactory=mismatched(which, tensor))
    first, second = GEMMS[which].items()
    pattern = rf"'decoder.fc1': {which} multiplies {first[0]} {first[1].value} \(.*{second[0]} {second[1].value} \("
    with cg.autocast(recipe=recipe), pytest.raises(ValueError, match=pattern) as error:
        layer(x)
    assert "mxfp8" in str(error.value) and "nvfp4" in str(error.value) and "allow_mixed" in str(error.value)
    assert (layer.quantizers, layer._built, layer.fp8, dict(layer.fp8_meta)) == state[:4]
    assert all(torch.equal(value, state[4][key]) for key, value in layer.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert_same_step(run(layer, x, good, dy), before)


def test_a_refused_recipe_leaves_a_new_layer_untouched():
    layer = cg.Linear(64, 96)
    recipe = recipes.CustomRecipe(qfactory=mismatched("fprop", "weight"))
    with cg.autocast(recipe=recipe), pytest.raises(ValueError, match="fprop multiplies"):
        layer(torch.randn(32, 64))
    assert not layer.fp8 and layer.quantizers == {"scaling_fwd": [], "scaling_bwd": []}


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_with_a_backward_override_only_fprop_has_to_pair(override):
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    recipe = recipes.CustomRecipe(qfactory=mismatched("wgrad", "input"), backward_override=override)
    run(layer, x, recipe, dy)
    recipe = recipes.CustomRecipe(qfactory=mismatched("fprop", "input"), backward_override=override)
    with cg.autocast(recipe=recipe), pytest.raises(ValueError, match="fprop multiplies"):
        layer(x)


@pytest.mark.parametrize("tensor", ["input", "grad_output"])
def test_inference_needs_only_the_operands_of_fprop_to_pair(tensor):
    layer = cg.Linear(64, 96, name="decoder.fc1")
    x, dy = sizes()
    recipe = recipes.CustomRecipe(qfactory=mismatched("wgrad", tensor))
    with torch.no_grad(), cg.autocast(recipe=recipe):
        y = layer(x)
    assert torch.equal(y, run(layer, x, recipes.MXFP8BlockScaling(), dy).y)
    with torch.no_grad(), cg.autocast(recipe=recipe):
        layer(x)
    rng = torch.get_rng_state()
    for forward in (layer, lambda x: cg.checkpoint(layer, x, use_reentrant=True)):  # whose first pass has no gradients
        leaf = x.detach().requires_grad_()
        with cg.autocast(recipe=recipe), pytest.raises(ValueError, match="'decoder.fc1': wgrad multiplies"):
            forward(leaf)
    assert torch.equal(torch.get_rng_state(), rng)
    recipe = recipes.CustomRecipe(qfactory=mismatched("fprop", "weight"))
    with torch.no_grad(), cg.autocast(recipe=recipe), pytest.raises(ValueError, match="fprop multiplies"):
        layer(x)


def test_a_quantized_weight_is_checked_as_it_is_not_as_the_recipe_would_make_it():
    """Its dgrad plane would otherwise be refused in the middle of backward."""
    with cg.quantized_model_init(recipe=recipes.CustomRecipe(qfactory=per_gemm("mxfp8", "nvfp4", "mxfp8"))):
        layer = cg.Linear(64, 96)
    with (
        cg.autocast(recipe=recipes.CustomRecipe(qfactory=factories.mxfp8_factory)),
        pytest.raises(ValueError, match=r"dgrad multiplies grad_output rowwise \(mxfp8\) by weight columnwise \(nvfp4"),
    ):
        layer(torch.randn(32, 64))


# ---- backward override --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mxfp8", "nvfp4", "fp8_current", "fp8_block"])
def test_backward_override(family):
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    recipe = make_recipe(family)
    plain = run(layer, x, recipe, dy)
    exact = reference(layer, x, dy)
    recipe.backward_override = "high_precision"
    high = run(layer, x, recipe, dy)
    assert torch.equal(high.y, plain.y)
    torch.testing.assert_close(Step(None, *high[1:]), Step(None, *exact[1:]))
    recipe.backward_override = "dequantized"
    step = run(layer, x, recipe, dy)
    details = layer._built.details[0]
    w, q = details.weight(layer.weight.detach()), details.input(x.detach())
    assert torch.equal(step.y, plain.y)
    torch.testing.assert_close(step.dx, dy @ w.dequantize(direction=ROWWISE))
    torch.testing.assert_close(step.dw, dy.t() @ q.dequantize(direction=ROWWISE))


# ---- where new tensors are made --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*cg.recipe.PRESETS, "all: nvfp4(row_scaled)", "all: mxint8", "all: hifloat8"])
def test_the_default_device_has_no_part_in_a_step(recipe):
    """Code that builds models under `torch.device("meta")` may also run layers that have memory."""
    recipe = cg.GemmRecipe.load(recipe)

    def step():
        torch.manual_seed(0)
        layer = cg.Linear(64, 96)
        x, dy = sizes()
        return run(layer, x, recipe, dy)

    expected = step()
    torch.manual_seed(0)
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    with torch.device("meta"):
        found = run(layer, x, recipe, dy)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
