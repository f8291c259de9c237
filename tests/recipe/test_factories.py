"""Factories, row by row of their tables."""

import pickle

import pytest

import crossgrain as cg
from crossgrain import DType
from crossgrain.quantizers.hybrid import HybridQuantizer
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    FP8Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    RecipeState,
    factories,
    quantizer_factory,
    zoo,
)

INPUT, WEIGHT, GRAD = "input", "weight", "grad_output"
OTHERS = [None, QuantizerRole(), QuantizerRole("linear", "output"), QuantizerRole("linear", "grad_input")]
OTHERS += [QuantizerRole("dpa", "qkv"), QuantizerRole("", "", "layer.qkv")]


def describe(quantizer):
    """A quantizer in the words of the tables."""
    if isinstance(quantizer, HybridQuantizer):
        source = {"original": "", "rowwise_dequantized": ", deq"}[quantizer.columnwise_source]
        return f"H({describe(quantizer.rowwise_quantizer)}, {describe(quantizer.columnwise_quantizer)}{source})"
    if isinstance(quantizer, DelayedScalingRequest):
        return f"delayed {quantizer.amax_history_len} {quantizer.amax_compute_algo} {quantizer.fp8_format.name}"
    name = type(quantizer).__name__.removesuffix("Quantizer")
    options = []
    if isinstance(quantizer, cg.NVFP4Quantizer):
        options = [quantizer.with_rht and "rht", quantizer.with_2d_quantization and "2d"]
        options += [quantizer.stochastic_rounding and "sr", quantizer.row_scaled_nvfp4 and "rows"]
        assert quantizer.with_post_rht_amax == quantizer.with_rht
    elif isinstance(quantizer, cg.Float8BlockQuantizer):
        assert quantizer.force_pow_2_scales
        options = [quantizer.dtype.name[-4:], f"{quantizer.block_scaling_dim}d"]
    elif name != "Identity":
        options = [quantizer.dtype.name[-4:]]
    return " ".join([name, *filter(None, options)])


def rows(factory, module_type="linear"):
    return [describe(factory(QuantizerRole(module_type, tensor, "name"))) for tensor in (INPUT, WEIGHT, GRAD)]


MX, RHT, TILES, SR, PLAIN = "MXFP8 E4M3", "NVFP4 rht", "NVFP4 2d", "NVFP4 rht sr", "NVFP4"
TABLE = {
    factories.high_precision_factory: (["Identity"] * 3, "Identity"),
    factories.delayed_scaling_factory: (["delayed 1024 max HYBRID"] * 3, "delayed 1024 max HYBRID"),
    factories.current_scaling_factory: (
        ["Float8CurrentScaling E4M3", "Float8CurrentScaling E4M3", "Float8CurrentScaling E5M2"],
        "Float8CurrentScaling E4M3",
    ),
    factories.float8_block_scaling_factory: (
        ["Float8Block E4M3 1d", "Float8Block E4M3 2d", "Float8Block E4M3 1d"],
        "Float8Block E4M3 1d",
    ),
    factories.mxfp8_factory: ([MX] * 3, MX),
    factories.nvfp4_factory: ([RHT, TILES, SR], RHT),
    zoo.high_precision_fwd_mxfp8_bwd_factory: ([f"H(Identity, {MX})"] * 2 + [MX], f"H(Identity, {MX})"),
    zoo.mxfp8_fwd_nvfp4_bwd_factory: ([f"H({MX}, {RHT})", f"H({MX}, {PLAIN}, deq)", SR], MX),
    zoo.nvfp4_1d_weight_factory: ([RHT, f"H({PLAIN}, {PLAIN}, deq)", SR], RHT),
    zoo.mxfp8_fwd_high_precision_bwd_factory: ([f"H({MX}, Identity, deq)"] * 2 + ["Identity"], MX),
    zoo.nvfp4_row_scaled_fwd_high_precision_bwd_factory: (
        ["H(NVFP4 rows, Identity, deq)", "H(NVFP4, Identity, deq)", "Identity"],
        PLAIN,
    ),
}


@pytest.mark.parametrize("factory", TABLE, ids=lambda factory: factory.__name__)
def test_tables(factory):
    linear, others = TABLE[factory]
    assert rows(factory) == rows(factory, "grouped_linear") == linear
    assert {describe(factory(role)) for role in OTHERS} == {others}


def test_row_scaled_forward_is_for_grouped_layers():
    factory = zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory
    assert rows(factory, "grouped_linear") == [f"H(NVFP4 rows, {MX}, deq)", f"H(NVFP4, {MX}, deq)", MX]
    assert rows(factory) == [MX] * 3
    assert {describe(factory(role)) for role in OTHERS} == {MX}


def test_attention_beside_nvfp4_layers():
    factory = zoo.nvfp4_linear_fp8_dpa_factory
    assert rows(factory) == rows(factory, "grouped_linear") == [RHT, TILES, SR]
    forward, backward = "Float8CurrentScaling E4M3", "Float8CurrentScaling E5M2"
    expected = {
        "qkv": forward,
        "s": "delayed 1 most_recent HYBRID",
        "dp": "delayed 1 most_recent HYBRID",
        "do": backward,
        "": forward,
    }
    assert {tensor: describe(factory(QuantizerRole("dpa", tensor))) for tensor in expected} == expected
    assert describe(factory(QuantizerRole("", "", "attention.dpa_output"))) == forward
    assert describe(factory(QuantizerRole("", "", "attention.dpa_grad_input"))) == backward
    assert describe(factory(None)) == describe(factory(QuantizerRole("", "", "other"))) == RHT


@pytest.mark.parametrize(
    "factory, recipe",
    [
        (factories.current_scaling_factory, Float8CurrentScaling()),
        (factories.float8_block_scaling_factory, Float8BlockScaling()),
        (factories.mxfp8_factory, MXFP8BlockScaling()),
        (factories.nvfp4_factory, NVFP4BlockScaling()),
    ],
)
def test_factories_do_what_the_recipe_classes_do(factory, recipe):
    for mode, tensors in (("forward", (INPUT, WEIGHT)), ("backward", (GRAD,))):
        roles = [QuantizerRole("linear", tensor) for tensor in tensors]
        both = [
            RecipeState.create(each, mode=mode, num_quantizers=len(roles), roles=roles).make_quantizers()
            for each in (recipe, CustomRecipe(factory))
        ]
        assert both[0] == both[1]


@pytest.mark.parametrize("factory", TABLE, ids=lambda factory: factory.__name__)
def test_recipes_with_these_factories_can_be_pickled(factory):
    recipe = CustomRecipe(factory)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize("factory", TABLE, ids=lambda factory: factory.__name__)
def test_every_call_makes_new_quantizers(factory):
    role = QuantizerRole("linear", WEIGHT)
    if factory is not factories.delayed_scaling_factory:
        assert factory(role) is not factory(role)


def test_request_defaults():
    assert factories.delayed_scaling_factory(None) == DelayedScalingRequest(
        FP8Format.HYBRID, margin=0, amax_history_len=1024, amax_compute_algo="max", reduce_amax=True
    )
    assert DType.kFloat8E4M3.name[-4:] == "E4M3"


def test_factories_have_keys():
    made = [value for module in (factories, zoo) for name, value in vars(module).items() if name.endswith("_factory")]
    own = [factory for factory in made if factory is not quantizer_factory]
    keys = {factory: factory.qfactory_key for factory in own}
    assert set(keys.values()) == {(factory.__name__, 1) for factory in own}
    assert all(CustomRecipe(qfactory=factory).qfactory_key == key for factory, key in keys.items())
    assert CustomRecipe(factories.mxfp8_factory, qfactory_key=("mine", 2)).qfactory_key == ("mine", 2)
    assert CustomRecipe(lambda role: None).qfactory_key is None


def test_a_key_names_a_factory_and_does_not_stand_for_it():
    first, second = (quantizer_factory(key=("same", 1))(lambda role: cg.IdentityQuantizer()) for _ in range(2))
    state = RecipeState.create(CustomRecipe(first), mode="forward", roles=[None])
    assert state.fits(CustomRecipe(first, qfactory_key=("other", 1)), [None])
    assert not state.fits(CustomRecipe(second), [None])
    with pytest.raises(TypeError, match="unhashable"):
        quantizer_factory(key=["a", 1])
