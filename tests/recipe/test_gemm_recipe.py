"""GemmRecipe: a value that compiles roles into quantizers."""

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings

import crossgrain as cg
from crossgrain.quantizers.hybrid import HybridQuantizer
from crossgrain.recipe import DelayedScalingRequest, FP8Format
from crossgrain.recipe.base import Recipe
from crossgrain.recipe.format_spec import FormatSpec
from crossgrain.recipe.gemm_recipe import GemmRecipe
from crossgrain.recipe.pairing import check_pairs
from crossgrain.recipe.roles import QuantizerRole

from ..common.recipes import recipes

TENSORS = ("input", "weight", "grad_output")
RHT = {"with_rht": True, "with_post_rht_amax": True}


def quantizers(recipe: GemmRecipe | str, name: str = "fc", module_type: str = "linear") -> tuple:
    """Of input, weight and grad_output."""
    recipe = GemmRecipe.load(recipe)
    return tuple(recipe.qfactory(QuantizerRole(module_type, tensor, name)) for tensor in TENSORS)


def hybrid(row: cg.Quantizer, column: cg.Quantizer, source: str = "original") -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source)  # type: ignore[arg-type]


def mxfp8(**options: bool) -> cg.MXFP8Quantizer:
    return cg.MXFP8Quantizer(cg.DType.kFloat8E4M3, **options)


nvfp4, hp = cg.NVFP4Quantizer, cg.IdentityQuantizer


# ---- a value ---------------------------------------------------------------------------------------


@given(recipes())
@settings(deadline=None, max_examples=50)
def test_recipes_are_values(recipe: GemmRecipe) -> None:
    for other in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other == recipe and hash(other) == hash(recipe)


def test_recipes_cannot_be_changed() -> None:
    recipe = GemmRecipe.load("mxfp8")
    with pytest.raises(FrozenInstanceError, match="cannot be changed"):
        recipe.allow_mixed = True  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del recipe.rules
    assert recipe.allow_mixed is False


def test_strings_and_specs_are_the_same() -> None:
    spec = FormatSpec("mxfp8")
    assert GemmRecipe(spec, spec, spec) == GemmRecipe("mxfp8", "mxfp8", "mxfp8") == GemmRecipe.load("mxfp8")
    assert GemmRecipe(spec, spec, spec) != GemmRecipe(spec, spec, spec, allow_mixed=True)
    assert GemmRecipe.load("mxfp8") != "mxfp8"


def test_the_constructor_says_the_same_as_a_line() -> None:
    recipe = GemmRecipe(
        fprop="mxfp8",
        dgrad="nvfp4(sr)",
        wgrad="nvfp4(rht, sr)",
        operands={"fprop.weight": "mxfp8(2d)", "attention.s": "fp8"},
        sources={"weight": "dequantized", "input": "original"},
        attention="fp8(e5m2)",
        rules=["*.head: hp", ("first 2 blocks", "mxfp8"), ("type=linear", {"fprop": "hp"})],
        blocks="layers",
        backward_override="dequantized",
    )
    assert recipe == GemmRecipe.load(
        "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr), fprop.weight: mxfp8(2d), weight.source: dequantized, "
        "attention: fp8(e5m2), attention.s: fp8, blocks: layers, backward_override: dequantized; "
        "*.head: hp; first 2 blocks: mxfp8; type=linear: fprop: hp"
    )
    assert str(recipe.fprop) == "mxfp8" and str(recipe.attention) == "fp8(e5m2)"
    assert recipe.backward_override == "dequantized" and recipe.blocks == "layers" and recipe.fp8_dpa


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="keys of operands must be like 'fprop.weight', got 'fprop'"):
        GemmRecipe("hp", "hp", "hp", operands={"fprop": "hp"})
    with pytest.raises(ValueError, match="no setting 'fprop.grad_output'"):
        GemmRecipe("hp", "hp", "hp", operands={"fprop.grad_output": "hp"})
    with pytest.raises(ValueError, match="weight.source must be original, dequantized or dequantized_late"):
        GemmRecipe("hp", "hp", "hp", sources={"weight": "rowwise"})
    with pytest.raises(ValueError, match="backward_override"):
        GemmRecipe("hp", "hp", "hp", backward_override="hp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a recipe must be the name of a preset, one line"):
        GemmRecipe.load(3)  # type: ignore[arg-type]


def test_it_is_a_recipe_with_a_factory() -> None:
    recipe = GemmRecipe.load("mxfp8")
    assert isinstance(recipe, Recipe) and recipe.custom() and not recipe.mxfp8()
    assert recipe.quantization_alignment == 128 and recipe.fp8_dpa is False


# ---- what options mean -----------------------------------------------------------------------------


def test_a_format_for_everything_is_one_quantizer_per_tensor() -> None:
    assert quantizers("mxfp8") == (mxfp8(), mxfp8(), mxfp8())


def test_options_of_a_gemm_go_to_the_operand_they_are_meant_for() -> None:
    assert quantizers("fprop: nvfp4(2d), dgrad: nvfp4(2d, sr), wgrad: nvfp4(rht, sr)") == (
        nvfp4(**RHT),
        nvfp4(with_2d_quantization=True),
        nvfp4(**RHT, stochastic_rounding=True),
    )


def test_an_operand_is_taken_literally() -> None:
    recipe = "nvfp4(2d, rht, sr), fprop.input: nvfp4(sr), fprop.weight: nvfp4"
    input, weight, _ = quantizers(recipe)
    assert input == hybrid(nvfp4(stochastic_rounding=True), nvfp4(**RHT))
    assert weight == hybrid(nvfp4(), nvfp4(with_2d_quantization=True))


def test_each_direction_has_the_format_of_the_gemm_that_reads_it() -> None:
    recipe = "fprop: mxfp8, dgrad: nvfp4, wgrad: hp"
    assert quantizers(recipe) == (hybrid(mxfp8(), hp()), hybrid(mxfp8(), nvfp4()), hybrid(nvfp4(), hp()))


def test_a_dequantized_source_makes_a_hybrid_even_of_one_format() -> None:
    _, weight, _ = quantizers("all: nvfp4, weight.source: dequantized")
    assert weight == hybrid(nvfp4(), nvfp4(), "rowwise_dequantized")
    _, weight, _ = quantizers("all: hp, weight.source: dequantized")
    assert weight == hp()  # there is nothing to decode


def test_quantizers_are_new_each_time() -> None:
    recipe, role = GemmRecipe.load("fprop: mxfp8, dgrad: nvfp4, wgrad: hp"), QuantizerRole("linear", "weight", "fc")
    first, second = recipe.qfactory(role), recipe.qfactory(role)
    assert first is not second and first.rowwise_quantizer is not second.rowwise_quantizer  # type: ignore[union-attr]


def test_compiled_quantizers_quantize(x: torch.Tensor) -> None:
    quantized = [q.quantize(x) for q in quantizers("mxfp8-fwd-nvfp4-bwd")]
    for tensor in quantized:
        assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    weight = quantized[1]
    decoded = mxfp8().quantize(x).dequantize()
    expected = nvfp4(rowwise=False).quantize(decoded)
    assert torch.equal(weight.columnwise_sub_storage.dequantize(), expected.dequantize())


# ---- delayed scaling -------------------------------------------------------------------------------


def test_delayed_scaling_is_requested() -> None:
    assert quantizers("fp8-delayed") == (DelayedScalingRequest(fp8_format=FP8Format.HYBRID),) * 3
    line = "all: fp8(delayed(history=16, algo=most_recent, margin=1, reduce=false))"
    input, _, grad_output = quantizers(line)
    options = {"amax_history_len": 16, "amax_compute_algo": "most_recent", "margin": 1, "reduce_amax": False}
    assert input == DelayedScalingRequest(fp8_format=FP8Format.HYBRID, **options)
    assert grad_output == DelayedScalingRequest(fp8_format=FP8Format.E4M3, **options)


def test_a_request_may_be_the_child_of_a_hybrid() -> None:
    input, weight, grad_output = quantizers("fprop: fp8(delayed), dgrad: mxfp8, wgrad: mxfp8")
    assert input.rowwise_quantizer == weight.rowwise_quantizer == DelayedScalingRequest()
    assert input.columnwise_quantizer.encoding(cg.COLUMNWISE).format.name == "mxfp8"
    check_pairs({"input": input, "weight": weight, "grad_output": grad_output})


# ---- roles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "role",
    [
        None,
        QuantizerRole(),
        QuantizerRole("linear", "output", "fc"),
        QuantizerRole("dpa", "qkv", "core"),
        QuantizerRole("dpa", "unknown", "core"),
        QuantizerRole(name="core.dpa_output"),
    ],
)
def test_what_no_gemm_reads_stays_as_it_is(role: QuantizerRole | None) -> None:
    assert GemmRecipe.load("nvfp4").qfactory(role) == hp()


def test_attention_has_an_entry_of_its_own() -> None:
    recipe = GemmRecipe.load("mxfp8, attention: fp8(e5m2), attention.s: hp")
    e4m3, e5m2 = FormatSpec("fp8").quantizer(), FormatSpec("fp8", element="e5m2").quantizer()
    wanted = {"qkv": e4m3, "s": hp(), "do": e5m2, "dp": e5m2}
    assert {t: recipe.qfactory(QuantizerRole("dpa", t, "core")) for t in wanted} == wanted
    assert recipe.qfactory(QuantizerRole(name="core.dpa_output")) == e4m3
    assert recipe.qfactory(QuantizerRole(name="core.dpa_grad_input")) == e5m2


def test_whether_attention_is_quantized_at_all() -> None:
    assert GemmRecipe.load("mxfp8; *.core: attention: fp8").fp8_dpa
    assert not GemmRecipe.load("mxfp8, attention.s: hp").fp8_dpa


# ---- pairs -----------------------------------------------------------------------------------------


def test_formats_that_do_not_pair_are_refused_when_the_recipe_is_made() -> None:
    line = "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4, fprop.weight: nvfp4"
    with pytest.raises(ValueError, match="fprop multiplies input rowwise .mxfp8. by weight rowwise .nvfp4."):
        GemmRecipe.load(line)
    mixed = GemmRecipe.load(f"{line}, allow_mixed: true")
    assert mixed.allow_mixed and quantizers(mixed)[1] == nvfp4()


def test_a_rule_that_does_not_pair_is_named() -> None:
    with pytest.raises(ValueError, match=r"rule 2 \(\*.q\): dgrad multiplies"):
        GemmRecipe.load("mxfp8; *.k: hp; *.q: dgrad.weight: nvfp4")


def test_a_rule_may_complete_one_before_it() -> None:
    recipe = GemmRecipe.load("mxfp8; attn.*: fprop: nvfp4; attn.q: fprop.input: nvfp4(row_scaled)")
    assert recipe.layer_formats("attn.q").format("fprop", "input").value.row_scaled
    recipe = GemmRecipe.load("mxfp8; *.q: fprop: nvfp4; *.k: fprop.input: nvfp4")
    with pytest.raises(ValueError, match="layer 'a.k': fprop multiplies"):  # found when they turn out not to meet
        recipe.qfactory(QuantizerRole("linear", "weight", "a.k"))
