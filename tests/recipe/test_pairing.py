"""The two operands of a GEMM have to be scaled and rotated alike."""

from types import SimpleNamespace

import pytest

import crossgrain as cg
from crossgrain.gemm.operands import scaling_family
from crossgrain.quantizers.request import QuantizerRequest
from crossgrain.recipe.pairing import check_pairs

E4M3, E5M2 = cg.DType.kFloat8E4M3, cg.DType.kFloat8E5M2


def layer(input: object, weight: object, grad_output: object) -> dict:
    return {"input": input, "weight": weight, "grad_output": grad_output}


def two(row: object, column: object) -> object:
    """What a hybrid quantizer shows of its children."""
    return SimpleNamespace(rowwise_quantizer=row, columnwise_quantizer=column)


@pytest.mark.parametrize("name", [fmt.name for fmt in cg.formats.formats()])
def test_one_format_everywhere_pairs(name: str) -> None:
    check_pairs(layer(*(cg.quantizer_for(name) for _ in range(3))))


@pytest.mark.parametrize(
    "first, second",
    [
        ("fp8", "fp8_e5m2"),
        ("fp8_block", "fp8_block_2d"),
        ("mxfp8", "mxfp4"),
        ("mxfp8_2d", "mxfp6_e3m2"),
        ("nvfp4", "nvfp4_2d"),
        ("nvfp4_row_scaled", "nvfp4_max256"),
    ],
)
def test_formats_of_one_family_pair(first: str, second: str) -> None:
    check_pairs(layer(cg.quantizer_for(first), cg.quantizer_for(second), cg.quantizer_for(first)))


def test_the_families_among_the_built_in_formats() -> None:
    assert {scaling_family(fmt) for fmt in cg.formats.BUILT_IN} == {
        "high precision",
        "FP8 with a scale per tensor",
        "FP8 in blocks of 128",
        "MX",
        "NVFP4",
        "int8 with power-of-two scales over 32",
        "hifloat8 with a scale per tensor",
        "NVFP4 with ue5m3 block scales",
    }


def test_an_error_names_layer_gemm_slots_formats_and_rule() -> None:
    mxfp8, nvfp4 = cg.quantizer_for("mxfp8"), cg.quantizer_for("nvfp4_2d")
    with pytest.raises(ValueError, match="fprop") as error:
        check_pairs(layer(mxfp8, nvfp4, nvfp4), layer="blocks.3.fc1")
    for part in (
        "layer 'blocks.3.fc1'",
        "fprop multiplies input rowwise (mxfp8) by weight rowwise (nvfp4_2d)",
        "these are MX and NVFP4",
        "allow_mixed",
    ):
        assert part in str(error.value)


def test_each_gemm_is_checked_in_its_own_directions() -> None:
    mxfp8, nvfp4, hp = (cg.quantizer_for(name) for name in ("mxfp8", "nvfp4", "identity"))
    check_pairs(layer(two(mxfp8, hp), two(mxfp8, nvfp4), two(nvfp4, hp)))
    with pytest.raises(ValueError, match="dgrad multiplies grad_output rowwise .mxfp8. by weight columnwise .nvfp4."):
        check_pairs(layer(two(mxfp8, hp), two(mxfp8, nvfp4), two(mxfp8, hp)))
    with pytest.raises(ValueError, match="wgrad multiplies grad_output columnwise .identity. by input columnwise"):
        check_pairs(layer(two(mxfp8, mxfp8), two(mxfp8, nvfp4), two(nvfp4, hp)))


def test_both_operands_of_wgrad_are_rotated_or_none() -> None:
    plain, rotated = cg.NVFP4Quantizer(), cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    check_pairs(layer(rotated, plain, rotated))
    with pytest.raises(ValueError, match="wgrad .* same Hadamard rotation"):
        check_pairs(layer(plain, plain, rotated))
    unsigned = cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False)
    with pytest.raises(ValueError, match="same Hadamard rotation"):
        check_pairs(layer(rotated, plain, unsigned))


def test_a_request_counts_as_fp8_with_a_scale_per_tensor() -> None:
    request, fp8 = QuantizerRequest(), cg.Float8CurrentScalingQuantizer(E5M2)
    check_pairs(layer(request, two(request, fp8), fp8))
    with pytest.raises(ValueError, match="FP8 with a scale per tensor and MX"):
        check_pairs(layer(request, cg.quantizer_for("mxfp8"), request))


def test_allow_mixed_accepts_everything() -> None:
    mxfp8, nvfp4 = cg.quantizer_for("mxfp8"), cg.quantizer_for("nvfp4")
    check_pairs(layer(mxfp8, nvfp4, mxfp8), allow_mixed=True)


def test_gemms_with_an_absent_operand_are_not_checked() -> None:
    check_pairs({"input": cg.quantizer_for("mxfp8"), "grad_output": None})
    check_pairs({})
