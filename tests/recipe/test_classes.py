"""Recipe classes: defaults, what they refuse, what they say about themselves."""

import pickle

import pytest

import crossgrain.recipe as r
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    FP8Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)


def identity_factory(role):
    raise AssertionError("nobody should ask")


RECIPES = {
    "delayed": DelayedScaling,
    "float8_current_scaling": Float8CurrentScaling,
    "mxfp8": MXFP8BlockScaling,
    "float8_block_scaling": Float8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "custom": lambda **options: CustomRecipe(identity_factory, **options),
}
ALL = pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)


def test_formats():
    assert {fmt.name: tuple(fmt.value) for fmt in FP8Format} == {
        "E2M1": (6, 6),
        "E4M3": (448, 448),
        "E5M2": (57344, 57344),
        "HYBRID": (448, 57344),
    }
    assert (FP8Format.HYBRID.value.max_fwd, FP8Format.HYBRID.value.max_bwd) == (448, 57344)


def test_defaults():
    expected = {
        "delayed": {
            "margin": 0,
            "fp8_format": FP8Format.HYBRID,
            "amax_history_len": 1024,
            "amax_compute_algo": "max",
            "scaling_factor_compute_algo": None,
            "reduce_amax": True,
        },
        "float8_current_scaling": {
            "use_power_2_scales": False,
            "fp8_format": FP8Format.HYBRID,
            "fp8_quant_fwd_inp": QParams(),
            "fp8_quant_fwd_weight": QParams(),
            "fp8_quant_bwd_grad": QParams(),
            "fp8_gemm_fprop": MMParams(use_split_accumulator=False),
            "fp8_gemm_dgrad": MMParams(use_split_accumulator=True),
            "fp8_gemm_wgrad": MMParams(use_split_accumulator=True),
        },
        "mxfp8": {"margin": 0, "fp8_format": FP8Format.E4M3, "enable_2d_quantization": False},
        "float8_block_scaling": {
            "use_f32_scales": False,
            "fp8_format": FP8Format.E4M3,
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
            "fp8_quant_fwd_inp": QParams(power_2_scale=True),
            "fp8_gemm_fprop": MMParams(),
        },
        "nvfp4": {
            "disable_rht": False,
            "disable_stochastic_rounding": False,
            "disable_2d_quantization": False,
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
            "nvfp4_4over6_e4m3_use_256": "all",
            "nvfp4_4over6_err_mode": "MAE",
            "fp4_format": FP8Format.E2M1,
            "fp8_format": FP8Format.E4M3,
            "fp4_quant_fwd_inp": QParams(random_hadamard_transform=True),
            "fp4_quant_fwd_weight": QParams(fp4_2d_quantization=True),
            "fp4_quant_bwd_grad": QParams(random_hadamard_transform=True, stochastic_rounding=True),
        },
        "custom": {"qfactory": identity_factory, "fp8_format": FP8Format.HYBRID, "quantization_alignment": 128},
    }
    common = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
    for kind, make in RECIPES.items():
        recipe = make()
        assert {name: getattr(recipe, name) for name in expected[kind] | common} == expected[kind] | common


def test_positional_order_of_fields():
    recipe = DelayedScaling(1, FP8Format.E4M3, 16, "most_recent")
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len, recipe.amax_compute_algo) == (
        1,
        FP8Format.E4M3,
        16,
        "most_recent",
    )


@pytest.mark.parametrize("kind", RECIPES)
def test_predicates(kind):
    class Derived(type(RECIPES[kind]())):
        pass

    predicates = {name: getattr(Derived, name)() for name in RECIPES}
    assert predicates == {name: name == kind for name in RECIPES}
    assert Derived.float8_per_tensor_scaling() == (kind in ("delayed", "float8_current_scaling"))


def test_environment_is_read_when_a_recipe_is_made(monkeypatch):
    for name in ("DISABLE_RHT", "DISABLE_STOCHASTIC_ROUNDING", "DISABLE_2D_QUANTIZATION", "ROW_SCALED_ACTIVATION"):
        monkeypatch.setenv(f"NVTE_NVFP4_{name}", "1")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "weights")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_E4M3_USE_256", "none")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_MODE", "mse")
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    nvfp4 = NVFP4BlockScaling()
    assert nvfp4.disable_rht and nvfp4.disable_stochastic_rounding
    assert nvfp4.disable_2d_quantization and nvfp4.row_scaled_activation
    assert (nvfp4.nvfp4_4over6, nvfp4.nvfp4_4over6_e4m3_use_256, nvfp4.nvfp4_4over6_err_mode) == (
        "weights",
        "none",
        "MSE",
    )
    assert nvfp4.fp4_quant_fwd_inp == nvfp4.fp4_quant_fwd_weight == nvfp4.fp4_quant_bwd_grad == QParams()
    assert nvfp4.backward_override == "dequantized"
    current, block = Float8CurrentScaling(), Float8BlockScaling()
    assert current.use_power_2_scales and current.fp8_quant_fwd_weight.power_2_scale
    assert block.use_f32_scales and not block.fp8_quant_bwd_grad.power_2_scale
    with pytest.raises(AssertionError, match="delayed scaling does not support backward_override"):
        DelayedScaling()
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "sometimes")
    with pytest.raises(AssertionError, match="sometimes"):
        MXFP8BlockScaling()
    assert MXFP8BlockScaling(backward_override=None).backward_override is None


def test_scale_options_reach_every_tensor():
    current = Float8CurrentScaling(use_power_2_scales=True)
    block = Float8BlockScaling(use_f32_scales=True)
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        assert getattr(current, name) == QParams(power_2_scale=True)
        assert getattr(block, name) == QParams(power_2_scale=False)
    assert Float8CurrentScaling.fp8_quant_fwd_inp == QParams(), "the class keeps its default"


def test_a_class_may_set_its_parameters():
    class Cautious(Float8CurrentScaling):
        fp8_quant_fwd_inp = QParams(amax_epsilon=1e-3)

    assert Cautious(use_power_2_scales=True).fp8_quant_fwd_inp == QParams(power_2_scale=True, amax_epsilon=1e-3)


@pytest.mark.parametrize("kind", ["delayed", "float8_current_scaling", "mxfp8", "float8_block_scaling"])
def test_pure_e5m2_is_refused(kind):
    with pytest.raises(AssertionError, match="E5M2"):
        RECIPES[kind](fp8_format=FP8Format.E5M2)


@ALL
def test_backward_override(make):
    with pytest.raises(AssertionError, match="backward_override"):
        make(backward_override="never")
    if make is DelayedScaling:
        with pytest.raises(
            AssertionError, match="does not support backward_override: it must be None, got 'dequantized'"
        ):
            make(backward_override="dequantized")
    else:
        assert make(backward_override="dequantized").backward_override == "dequantized"


@pytest.mark.parametrize(
    "options, match",
    [
        ({"x_block_scaling_dim": 3}, "x_block_scaling_dim must be 1 or 2"),
        ({"w_block_scaling_dim": 0}, "w_block_scaling_dim"),
        ({"grad_block_scaling_dim": 4}, "grad_block_scaling_dim"),
        ({"x_block_scaling_dim": 2}, "x_block_scaling_dim and w_block_scaling_dim cannot both be 2"),
        ({"grad_block_scaling_dim": 2}, "w_block_scaling_dim and grad_block_scaling_dim cannot both be 2"),
        (
            {"w_block_scaling_dim": 1, "x_block_scaling_dim": 2, "grad_block_scaling_dim": 2},
            "x_block_scaling_dim and grad_block_scaling_dim cannot both be 2",
        ),
        ({"fp8_gemm_dgrad": MMParams(use_split_accumulator=False)}, "dgrad"),
        ({"fp8_dpa": True}, "attention"),
        ({"fp8_mha": True}, "attention"),
    ],
)
def test_block_scaling_refuses(options, match):
    with pytest.raises(AssertionError, match=match):
        Float8BlockScaling(**options)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"fp4_format": FP8Format.E4M3}, "codes are E2M1"),
        ({"fp8_format": FP8Format.HYBRID}, "scales are E4M3"),
        ({"nvfp4_4over6": "some"}, "nvfp4_4over6 must be"),
        ({"nvfp4_4over6_e4m3_use_256": "some"}, "use_256 must be"),
        ({"nvfp4_4over6_err_mode": "RMS"}, "err_mode"),
    ],
)
def test_nvfp4_refuses(options, match):
    with pytest.raises(AssertionError, match=match):
        NVFP4BlockScaling(**options)


@pytest.mark.parametrize("options", [{"amax_history_len": 0}, {"amax_compute_algo": "median"}])
def test_delayed_scaling_refuses(options):
    with pytest.raises(AssertionError, match=next(iter(options))):
        DelayedScaling(**options)


def test_custom_recipe_refuses():
    with pytest.raises(TypeError):
        CustomRecipe()
    with pytest.raises(TypeError, match="function of a role"):
        CustomRecipe(qfactory="mxfp8")
    for alignment in (0, -16):
        with pytest.raises(ValueError, match="quantization_alignment"):
            CustomRecipe(identity_factory, quantization_alignment=alignment)


@ALL
def test_repr_follows_every_assignment(make):
    recipe = make()
    before = repr(recipe)
    assert before.startswith(type(recipe).__name__) and "fp8_dpa=False" in before
    assert repr(recipe) is before, "it is made once"
    recipe.fp8_dpa = True
    assert "fp8_dpa=True" in repr(recipe)


@ALL
def test_recipes_survive_pickling(make):
    recipe = make()
    repr(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize("small", [MMParams(), QParams(), r.DelayedScalingRequest(), r.QuantizerRole()])
def test_values_are_frozen(small):
    with pytest.raises(AttributeError):
        small.anything = 1
    assert small == type(small)()
