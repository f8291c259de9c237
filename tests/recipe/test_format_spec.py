"""A format with options as a value: text, errors that point, and the quantizer it stands for."""

import copy
import pickle

import pytest
import torch
from hypothesis import given

import crossgrain as cg
from crossgrain.recipe.format_spec import Delayed, FormatSpec, FourOverSix, StochasticRounding, aliases, format_names
from crossgrain.recipe.syntax import RecipeSyntaxError

from ..common.format_specs import any_spec


@given(any_spec())
def test_text_and_value_are_the_same_thing(spec: FormatSpec) -> None:
    assert FormatSpec.parse(str(spec)) == spec
    assert str(FormatSpec.parse(str(spec))) == str(spec)


@given(any_spec())
def test_specs_are_values(spec: FormatSpec) -> None:
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other == spec and hash(other) == hash(spec)


@pytest.mark.parametrize(
    "text, canonical",
    [
        (" nvfp4( sr ,rht ) ", "nvfp4(rht, sr)"),
        ("nvfp4()", "nvfp4"),
        ("mxfp8(e4m3)", "mxfp8"),
        ("fp8_e5m2", "fp8(e5m2)"),
        ("fp8_block_2d_e5m2", "fp8_block(e5m2, 2d)"),
        ("nvfp4_2d(sr)", "nvfp4(2d, sr)"),
        ("identity", "hp"),
        ("bf16", "hp(bf16)"),
        ("nvfp4(4over6)", "nvfp4(4over6)"),
        ("nvfp4(4over6(mse))", "nvfp4(4over6(mse))"),
        ("nvfp4(sr(philox), rht)", "nvfp4(rht, sr(philox))"),
        ("mxfp4(sr(random=hash))", "mxfp4(sr)"),
        ("nvfp4(4over6(max=448, error=mse))", "nvfp4(4over6(mse, max=448))"),
        ("fp8(eps=0.000001)", "fp8(eps=1e-06)"),
        ("fp8(delayed)", "fp8(delayed)"),
        ("fp8(delayed(algo=most_recent, history=16))", "fp8(delayed(history=16, algo=most_recent))"),
        ("fp8(delayed(reduce=false))", "fp8(delayed(reduce=false))"),
    ],
)
def test_texts_have_a_canonical_form(text: str, canonical: str) -> None:
    assert str(FormatSpec.parse(text)) == canonical


@pytest.mark.parametrize(
    "text, message, marked",
    [
        ("nvfp4(rth)", "nvfp4 has no option 'rth'; did you mean 'rht'?", "rth"),
        ("mxfp9", "no format 'mxfp9'; did you mean 'mxfp8'?", "mxfp9"),
        ("zzz", "there is no format 'zzz'; available: hp, fp8, ", "zzz"),
        ("nvfp4(rht", "this parenthesis is not closed", "("),
        ("nvfp4(rht))", "unexpected text after 'nvfp4'", ")"),
        ("nvfp4(,)", "expected a name, got ','", ","),
        ("nvfp4(sr, sr)", "nvfp4 already has the option sr", "sr"),
        ("nvfp4_2d(2d)", "nvfp4_2d already has the option 2d", "2d"),
        ("fp8(e4m3, e5m2)", "fp8 already has the option e4m3/e5m2", "e5m2"),
        ("fp8(delayed(history=0))", "history must be at least one step, got 0", "history=0"),
        ("fp8(delayed(history=x))", "expected a number, got 'x'", "history=x"),
        ("fp8(delayed(histroy=2))", "did you mean 'history'?", "histroy=2"),
        ("fp8(delayed(algo=mean))", "algo must be max or most_recent, got 'mean'", "algo=mean"),
        ("fp8(delayed(reduce=maybe))", "expected true or false, got 'maybe'", "reduce=maybe"),
        ("fp8(eps)", "eps needs a value", "eps"),
        ("fp8(eps=nan)", "eps must be a finite number >= 0", "fp8"),
        ("fp8(pow2=3)", "the option pow2 has no value", "pow2=3"),
        ("nvfp4(4over6(mad))", "the error must be mae or mse", "mad"),
        ("nvfp4(sr(phlox))", "the random source must be 'hash' or 'philox', got 'phlox'", "phlox"),
        ("nvfp4=sr", "write the options of nvfp4 in parentheses", "nvfp4=sr"),
        ("mxfp8(sr)", "mxfp8 has no option 'sr'; available: e4m3, e5m2, 2d", "sr"),
    ],
)
def test_an_error_points_at_the_mistake(text: str, message: str, marked: str) -> None:
    with pytest.raises(RecipeSyntaxError) as error:
        FormatSpec.parse(text)
    first, shown, carets = str(error.value).split("\n")
    assert message in first
    assert shown == f"  {text}"
    start = carets.index("^")
    assert shown[start : start + carets.count("^")] == marked


def test_an_error_survives_pickling() -> None:
    with pytest.raises(RecipeSyntaxError) as error:
        FormatSpec.parse("nvfp4(rth)")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_long_text_is_cut_around_the_mistake() -> None:
    error = RecipeSyntaxError("wrong", "a" * 200 + "X" + "b" * 200, 200, 201)
    _, shown, carets = str(error).split("\n")
    assert len(shown) < 100 and shown[carets.index("^")] == "X"


@pytest.mark.parametrize("name", [fmt.name for fmt in cg.formats.formats()])
def test_every_registered_format_has_its_name_here(name: str) -> None:
    spec = FormatSpec.parse(name)
    assert spec.stored_format(cg.ROWWISE) == cg.get_format(name)
    assert spec.quantizer() == cg.quantizer_for(name)


def test_a_format_that_is_registered_later_is_known() -> None:
    fmt = cg.formats.ocp_mx_format("mxfp6_for_this_test", cg.formats.E3M2)
    cg.register_format(fmt)
    try:
        assert FormatSpec.parse("mxfp6_for_this_test(sr)").quantizer() == cg.FormatQuantizer(
            fmt, stochastic_rounding=True
        )
    finally:
        cg.formats.registry._FORMATS.pop(fmt.name)


@pytest.mark.parametrize(
    "text, quantizer",
    [
        ("hp", cg.IdentityQuantizer()),
        ("bf16", cg.IdentityQuantizer(dtype=torch.bfloat16)),
        ("fp8", cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3)),
        (
            "fp8(e5m2, pow2, eps=0.5)",
            cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E5M2, force_pow_2_scales=True, amax_epsilon=0.5),
        ),
        (
            "fp8_block(f32_scales, eps=0.5)",
            cg.Float8BlockQuantizer(
                cg.DType.kFloat8E4M3,
                rowwise=True,
                columnwise=True,
                amax_epsilon=0.5,
                force_pow_2_scales=False,
                block_scaling_dim=1,
            ),
        ),
        ("fp8_block(2d)", cg.Float8BlockQuantizer(cg.DType.kFloat8E4M3, rowwise=True, columnwise=True)),
        ("mxfp8(e5m2, 2d)", cg.MXFP8Quantizer(cg.DType.kFloat8E5M2, with_2d_quantization=True)),
        (
            "nvfp4(rht, sr)",
            cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
        ),
        (
            "nvfp4(4over6(mse, max=448))",
            cg.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE"),
        ),
        ("mxfp4(sr)", cg.FormatQuantizer("mxfp4", stochastic_rounding=True)),
    ],
)
def test_the_quantizer_has_the_options(text: str, quantizer: cg.Quantizer) -> None:
    assert FormatSpec.parse(text).quantizer() == quantizer


def test_each_call_makes_a_new_quantizer() -> None:
    spec = FormatSpec.parse("nvfp4")
    assert spec.quantizer() is not spec.quantizer()


def test_options_that_exclude_each_other_are_refused_for_one_operand() -> None:
    spec = FormatSpec.parse("nvfp4(2d, rht)")  # fine for a whole recipe
    with pytest.raises(ValueError, match="nvfp4.2d, rht.: .* cannot be combined"):
        spec.quantizer()
    with pytest.raises(ValueError, match="pow2 and eps are options of current scaling"):
        FormatSpec.parse("fp8(pow2, delayed)").stored_format(cg.ROWWISE)


def test_values_are_checked_without_text_too() -> None:
    with pytest.raises(ValueError, match="mxfp8 has no option 'sr'"):
        FormatSpec("mxfp8", sr=StochasticRounding())
    with pytest.raises(ValueError, match="no format 'bf16'"):
        FormatSpec("bf16")  # an alias is text, not a format
    with pytest.raises(ValueError, match="at least one step"):
        Delayed(history=0)
    with pytest.raises(ValueError, match="256 or 448"):
        FourOverSix(max=300)
    with pytest.raises(TypeError, match="written as text"):
        FormatSpec.parse(3)  # type: ignore[arg-type]


def test_no_alias_hides_a_canonical_name() -> None:
    assert not set(aliases()) & set(format_names())
