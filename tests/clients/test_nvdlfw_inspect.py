"""Transformer Engine's debug features that change numbers: the package nvdlfw_inspect and its YAML drive our layers."""

import importlib

import pytest
import torch

import crossgrain as cg
from crossgrain import compat
from crossgrain.compat.debug import FEATURES
from crossgrain.compat.debug.fake_quant import fake_quantize, per_tensor_cast

from .inspecting import batch, converted, debug_api, equal, session, trained

te = compat.transformer_engine.pytorch
recipes = compat.transformer_engine.common.recipe
HYBRID = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"
RECIPES = ["mxfp8", "nvfp4", "fp8", "fp8(delayed)", "fp8_block", HYBRID]
GEMMS = ["fprop", "dgrad", "wgrad"]
OPERANDS = {"gemms": GEMMS, "tensors": ["activation", "weight", "gradient"]}


# ---- GEMMs and layers in high precision ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemms", [["fprop"], ["dgrad"], ["wgrad"], ["dgrad", "wgrad"]])
def test_disabled_gemms_are_those_of_a_rule_bit_for_bit(recipe, gemms, tmp_path):
    rule = ", ".join(f"{gemm}: hp" for gemm in gemms)
    expected = trained(converted(f"{recipe}; fc1: {rule}"))
    with session({"DisableQuantizationGEMM": {"gemms": gemms}}, tmp_path):
        assert equal(trained(converted(recipe), step=debug_api.step), expected)
    plain = trained(converted(recipe))
    assert not equal(plain, expected)
    assert equal(trained(converted(recipe)), plain)  # after the session nothing is different


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_disabled_layer_is_one_in_high_precision(recipe, tmp_path):
    expected = trained(converted(f"{recipe}; fc1: hp"))
    with session({"DisableQuantizationLayer": {}}, tmp_path):
        assert equal(trained(converted(recipe), step=debug_api.step), expected)


@pytest.mark.parametrize("old", ["DisableFP8GEMM", "DisableFp8Gemm"])
def test_old_names_of_gemms_mean_the_same(old, tmp_path):
    expected = trained(converted("mxfp8; fc1: fprop: hp"))
    with session({old: {"gemms_struct": [{"gemm": "fprop"}]}}, tmp_path):
        assert equal(trained(converted("mxfp8")), expected)


@pytest.mark.parametrize("old", ["DisableFP8Layer", "DisableFp8Layer"])
def test_old_names_of_layers_mean_the_same(old, tmp_path):
    expected = trained(converted("mxfp8; fc1: hp"))
    with session({old: {}}, tmp_path):
        assert equal(trained(converted("mxfp8")), expected)


def test_features_that_are_not_enabled_do_nothing(tmp_path):
    off = {"enabled": False, "gemms": ["fprop"]}
    expected = trained(converted("mxfp8"))
    with session({"DisableQuantizationGEMM": off, "LogTensorStats": {"enabled": False}}, tmp_path):
        assert equal(trained(converted("mxfp8"), step=debug_api.step), expected)


def test_weights_that_are_cached_for_microbatches_are_quantized_as_features_say(tmp_path):
    def run():
        torch.manual_seed(0)
        layer, found = te.Linear(64, 32, name="fc1"), []
        for first in (True, False):
            with te.autocast(recipe=recipes.MXFP8BlockScaling()):
                y = layer(batch(), is_first_microbatch=first)
            y.square().sum().backward()
            found.append(y.detach())
        return [*found, layer.weight.grad]

    with session({"DisableQuantizationLayer": {}}, tmp_path):
        y, again, _ = run()
    torch.manual_seed(0)
    assert torch.equal(y, again) and torch.equal(y, te.Linear(64, 32)(batch()).detach())
    with session({"DisableQuantizationGEMM": {"gemms": ["wgrad"]}}, tmp_path):
        changed = run()
    plain = run()
    assert equal(changed[:2], plain[:2]) and not torch.equal(changed[2], plain[2])


# ---- FakeQuant -------------------------------------------------------------------------------------------------


def by_hand(fmt, dtype=torch.float32, rows=40):
    """The first layer in high precision, with operands that were quantized and decoded."""
    model, x = converted(None, dtype), batch(rows, dtype)
    layer = cg.Linear(64, 96, params_dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(fake_quantize(model.fc1.weight, fmt))
        layer.bias.copy_(model.fc1.bias)
    x = fake_quantize(x, fmt).requires_grad_()
    y = layer(x)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype)
    y.backward(fake_quantize(dy, fmt))
    return y.detach(), x.grad, layer.weight.grad


def by_feature(recipe, dtype=torch.float32, rows=40):
    model, x = converted(recipe, dtype), batch(rows, dtype).requires_grad_()
    layer = model.fc1
    if recipe is None:
        cg.convert(model, "hp")
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype))
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("recipe", [None, "mxfp8", HYBRID, "fp8(delayed)"])
@pytest.mark.parametrize("fmt", ["FP8E4M3", "FP8E5M2", "MXFP8E4M3", "MXFP8E5M2", "FP8_BLOCKWISE_E4M3"])
def test_fake_quant_multiplies_decoded_operands_in_high_precision(recipe, fmt, tmp_path):
    with session({"FakeQuant": {**OPERANDS, "quant_format": fmt}}, tmp_path):
        assert equal(by_feature(recipe), by_hand(fmt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fake_quant_keeps_the_dtype(dtype, tmp_path):
    with session({"FakeQuant": {**OPERANDS, "quant_format": "FP8E4M3"}}, tmp_path):
        assert equal(by_feature("mxfp8", dtype), by_hand("FP8E4M3", dtype))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp6_e3m2", "mxint8"])
def test_formats_of_crossgrain_are_made_in_the_direction_that_a_gemm_reads(fmt, tmp_path):
    """Codes times power-of-two scales are exact, so that decoded planes give the bits of a layer that has them."""
    with session({"FakeQuant": {**OPERANDS, "quant_format": fmt}}, tmp_path):
        found = by_feature("mxfp8")
    assert equal(found, by_feature(fmt))


def test_fake_quant_is_for_single_operands(tmp_path):
    struct = [
        {"gemm": "fprop", "tensors_struct": [{"tensor": "activation", "quant_format": "FP8E5M2"}]},
        {"gemm": "dgrad", "tensors": ["weight"], "quant_format": "MXFP8E4M3"},
    ]
    with session({"FakeQuant": {"gemms_struct": struct}}, tmp_path):
        y, dx, dw = by_feature("mxfp8")
    layer, x, dy = converted(None).fc1, batch(), torch.linspace(-1, 1, 40 * 96).view(40, 96)
    exact = cg.Linear(64, 96)
    with torch.no_grad():
        exact.weight.copy_(layer.weight)
        exact.bias.copy_(layer.bias)
        assert torch.equal(y, exact(fake_quantize(x, "FP8E5M2")))
        exact.weight.copy_(fake_quantize(layer.weight, "MXFP8E4M3"))
    x = x.requires_grad_()
    exact(x).backward(dy)
    assert torch.equal(dx, x.grad) and torch.equal(dw, by_feature("mxfp8")[2])  # wgrad is as the recipe says


@pytest.mark.parametrize("name, at", [("output", 0), ("dgrad", 1), ("wgrad", 2)])
def test_fake_quant_of_results(name, at, tmp_path):
    gemm = {"output": "fprop"}.get(name, name)
    with session({"FakeQuant": {"gemms": [gemm], "tensors": [name], "quant_format": "FP8E4M3"}}, tmp_path):
        found = by_feature("mxfp8")
    expected = by_feature(f"mxfp8; fc1: {gemm}: hp")  # the GEMM runs in high precision, as in Transformer Engine
    assert torch.equal(found[at], fake_quantize(expected[at], "FP8E4M3"))
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True)) if i != at)


def test_a_margin_makes_scales_smaller(tmp_path):
    settings = {"gemms": ["fprop"], "tensors": ["activation", "weight"], "quant_format": "FP8E4M3", "margin": 3}
    with session({"FakeQuant": settings}, tmp_path):
        y, *_ = by_feature("mxfp8")
    model = converted(None)
    exact = cg.Linear(64, 96)
    with torch.no_grad():
        exact.weight.copy_(fake_quantize(model.fc1.weight, "FP8E4M3", margin=3))
        exact.bias.copy_(model.fc1.bias)
        assert torch.equal(y, exact(fake_quantize(batch(), "FP8E4M3", margin=3)))
    amax = batch().abs().max()
    scale = per_tensor_cast(batch(), cg.DType.kFloat8E4M3, margin=3)._scale_inv
    torch.testing.assert_close(scale[0], amax * 8 / 448)


# ---- PerTensorScaling ------------------------------------------------------------------------------------------


def under(recipe, steps=2):
    torch.manual_seed(0)
    layer, found = te.Linear(64, 32, name="fc1"), []
    for at in range(steps):
        x = batch(seed=at).requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(x)
        layer.zero_grad()
        y.square().sum().backward()
        debug_api.step()
        found += [y.detach(), x.grad, layer.weight.grad]
    return found


def test_per_tensor_scaling_of_all_operands_is_current_scaling(tmp_path):
    expected, delayed = under(recipes.Float8CurrentScaling()), under(recipes.DelayedScaling())
    assert not equal(expected, delayed)
    with session({"PerTensorScaling": OPERANDS}, tmp_path):
        assert equal(under(recipes.DelayedScaling()), expected)


def test_per_tensor_scaling_is_for_single_operands(tmp_path):
    with session({"PerTensorScaling": {"gemms": ["fprop"], "tensors": ["activation", "weight"]}}, tmp_path):
        found = under(recipes.DelayedScaling(), steps=1)
    current, delayed = under(recipes.Float8CurrentScaling(), 1), under(recipes.DelayedScaling(), 1)
    assert torch.equal(found[0], current[0]) and not torch.equal(found[0], delayed[0])
    # dy follows from y, so that gradients are compared in a layer of which only dgrad is different
    with session({"PerTensorScaling": {"gemms": ["dgrad"], "tensors": ["gradient", "weight"]}}, tmp_path):
        found = under(recipes.DelayedScaling(), steps=1)
    assert (
        torch.equal(found[0], delayed[0])
        and torch.equal(found[2], delayed[2])
        and not torch.equal(found[1], delayed[1])
    )


def test_per_tensor_scaling_of_one_direction_of_a_hybrid(tmp_path):
    rest = "dgrad: mxfp8, wgrad: mxfp8"
    expected = trained(converted(f"fprop: fp8, {rest}; fc2: mxfp8"))
    with session({"PerTensorScaling": {"gemms": ["fprop"], "tensors": ["activation", "weight"]}}, tmp_path):
        assert equal(trained(converted(f"fprop: fp8(delayed), {rest}; fc2: mxfp8")), expected)


@pytest.mark.parametrize("recipe, has", [("mxfp8", "MXFP8Quantizer"), ("fp8", "Float8CurrentScalingQuantizer")])
def test_per_tensor_scaling_needs_delayed_scaling(recipe, has, tmp_path):
    expected = pytest.raises(ValueError, match=f"layer 'fc1': PerTensorScaling of gradient in wgrad .* has {has}: use")
    with session({"PerTensorScaling": {"gemms": ["wgrad"], "tensors": ["gradient"]}}, tmp_path), expected:
        converted(recipe)(batch())  # before anything runs, although it is for backward


# ---- features together -----------------------------------------------------------------------------------------


def test_features_of_one_layer_work_together(tmp_path):
    """The configuration of Transformer Engine's own test for the manipulation of tensors."""
    features = {
        "DisableFP8GEMM": {"gemms": ["fprop"]},
        "PerTensorScaling": {"gemms": ["wgrad"], "tensors": ["gradient", "activation"]},
        "FakeQuant": {
            "gemms": ["fprop"],
            "tensors_struct": [
                {"tensor": "activation", "quant_format": "FP8E4M3"},
                {"tensor": "weight", "quant_format": "FP8E4M3"},
            ],
        },
    }
    with session(features, tmp_path):
        y, dx, dw = by_feature("fp8(e4m3, delayed)")
    assert torch.equal(y, by_hand("FP8E4M3")[0]) and torch.equal(dw, by_feature("fp8(e4m3)")[2])
    assert torch.equal(dx, by_feature("fp8(e4m3, delayed)")[1])


def test_operands_that_cannot_be_multiplied_are_refused_with_the_layer(tmp_path):
    features = {
        "DisableQuantizationGEMM": {"gemms": ["fprop"]},
        "PerTensorScaling": {"gemms": ["fprop"], "tensors": ["activation"]},
    }
    said = "layer 'fc1': fprop multiplies input .* by weight rowwise .* Debug features have changed activation, weight"
    with session(features, tmp_path), pytest.raises(ValueError, match=said):
        converted("fp8(delayed)")(batch())


def test_groups_have_the_same_features(tmp_path):
    def run(recipe):
        torch.manual_seed(0)
        layer = te.GroupedLinear(3, 64, 32, name="experts")
        layer.bound_recipe = cg.GemmRecipe.load(recipe)
        x = batch(60).requires_grad_()
        y = layer(x, [20, 0, 40])
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    expected, others = run("nvfp4; experts: fprop: hp"), run("mxfp6_e3m2")
    with session({"DisableQuantizationGEMM": {"gemms": ["fprop"]}}, tmp_path, layers="experts.*"):
        assert equal(run("nvfp4"), expected)
    with session({"FakeQuant": {**OPERANDS, "quant_format": "mxfp6_e3m2"}}, tmp_path, layers="experts.gemm_[012]"):
        assert equal(run("mxfp8"), others)
    expected = pytest.raises(ValueError, match="'experts.gemm_0' and 'experts.gemm_2' are groups of one grouped layer")
    with session({"DisableQuantizationLayer": {}}, tmp_path, layers="gemm_[01]"), expected:
        run("mxfp8")


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_changed_in_the_same_way(reentrant, tmp_path):
    def run(checkpointed):
        model, x = converted(HYBRID), batch().requires_grad_()
        torch.manual_seed(3)
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    features = {"FakeQuant": {"gemms": ["fprop"], "tensors": ["activation", "output"], "quant_format": "FP8E4M3"}}
    with session(features, tmp_path):
        assert equal(run(True), run(False))


def test_compiled_models_obey_features_that_come_later(tmp_path):
    model = converted("mxfp8")
    compiled = torch.compile(model, backend="eager")
    before = compiled(batch())
    with session({"DisableQuantizationLayer": {}}, tmp_path):
        assert torch.equal(compiled(batch()), converted("mxfp8; fc1: hp")(batch()))
    assert torch.equal(compiled(batch()), before)


def test_float32_weights_under_torch_autocast(tmp_path):
    """Without a recipe operands are cast to the dtype of activations, as without features."""
    layer = te.Linear(64, 32, name="fc1")
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(batch())
    features = {"FakeQuant": {"gemms": ["wgrad"], "tensors": ["activation"], "quant_format": "FP8E4M3"}}
    with session(features, tmp_path), torch.autocast("cpu", torch.bfloat16):
        found = layer(batch())
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


# ---- what is refused -------------------------------------------------------------------------------------------


def test_a_recipe_that_overrides_backward_leaves_nothing_to_change(tmp_path):
    for override in ("dequantized", "high_precision"):
        said = f"layer 'fc1': .* in wgrad, but the recipe has backward_override='{override}'"
        with session({"FakeQuant": {**OPERANDS, "quant_format": "FP8E4M3"}}, tmp_path):
            model = converted(f"mxfp8, backward_override: {override}")
            with pytest.raises(ValueError, match=said):
                model(batch())
    with session({"DisableQuantizationLayer": {}}, tmp_path):
        converted("mxfp8, backward_override: high_precision")(batch())


def test_weights_that_are_kept_quantized_have_no_other_numbers(tmp_path):
    with te.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        layer = te.Linear(64, 32, name="fc1")

    def run():
        with te.autocast(recipe=recipes.MXFP8BlockScaling()):
            return layer(batch(32))

    refused = pytest.raises(
        ValueError, match="layer 'fc1': .* the weight is kept quantized, and has no numbers in high"
    )
    with session({"DisableQuantizationGEMM": {"gemms": ["fprop"]}}, tmp_path), refused:
        run()
    expected = run()
    with session({"DisableQuantizationGEMM": {"gemms": ["wgrad"]}}, tmp_path):
        assert torch.equal(run(), expected)


def test_ending_between_forward_and_backward_is_an_error_if_numbers_depend_on_it(tmp_path):
    model, x = converted("mxfp8"), batch()
    with session({"FakeQuant": {**OPERANDS, "quant_format": "FP8E4M3"}}, tmp_path):
        y = model(x)
    with pytest.raises(
        RuntimeError, match=r"layer 'fc1': .* debug_api.end_debug\(\) was called after its forward pass"
    ):
        y.sum().backward()


def test_a_session_that_could_not_begin_has_no_effect(tmp_path):
    expected = trained(converted("mxfp8"))
    with pytest.raises(AssertionError, match="Could not find features path"):
        debug_api.initialize("", feature_dirs=[FEATURES, str(tmp_path / "nothing")], log_dir=str(tmp_path))
    assert debug_api.DEBUG_MANAGER is None and equal(trained(converted("mxfp8")), expected)
    with session({"DisableQuantizationLayer": {}}, tmp_path):
        assert not equal(trained(converted("mxfp8")), expected)


def test_answers_of_several_features_are_joined():
    joined_answers = importlib.import_module("crossgrain.compat.debug.api").joined_answers
    assert joined_answers("fp8_gemm_enabled", [(True, None), (False, 3)]) == (False, 3)
    assert joined_answers("inspect_tensor_enabled", [(False, 9), (True, 4), (False, None)]) == (True, 4)
    assert joined_answers("modify_tensor_enabled", [(False, None), (False, None)]) == (False, None)
    assert joined_answers("inspect_tensor_enabled", [(False, 9), True]) is True  # one does not know when next


def test_every_name_of_the_debug_module_is_there():
    features = compat.transformer_engine.debug.features
    modules = [module for module in vars(features).values() if hasattr(module, "_elsewhere")]
    assert len(modules) == 11
    for module in [*modules, features.utils.stats_buffer]:
        assert all(getattr(module, name) is not None for name in module._elsewhere)
