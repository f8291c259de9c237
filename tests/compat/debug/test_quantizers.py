"""Quantizers of tensors that features change, one direction at a time."""

import pytest
import torch

import crossgrain as cg
from crossgrain.compat.debug.quantizers import FeatureQuantizer, Modified, changed_quantizer
from crossgrain.formats import IDENTITY
from crossgrain.planes import COLUMNWISE, ROWWISE
from crossgrain.quantizers.hybrid import HybridQuantizer
from crossgrain.quantizers.subject import Subject

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
E4M3 = cg.DType.kFloat8E4M3
RECIPE = {ROWWISE: "recipe", COLUMNWISE: "recipe"}


def parent():
    made = HybridQuantizer(rowwise_quantizer=cg.MXFP8Quantizer(E4M3), columnwise_quantizer=cg.NVFP4Quantizer())
    made.nonfinite, made.subject = "raise", Subject("fc1", "input")
    return made


def planes(quantizer):
    made = quantizer.make_planes(X, rowwise=True, columnwise=True)
    return made.plane(ROWWISE), made.plane(COLUMNWISE)


def test_a_direction_in_high_precision_leaves_the_other_as_it_is():
    rows, columns = planes(parent())
    found = planes(changed_quantizer(parent(), {**RECIPE, ROWWISE: "high precision"}, {}))
    assert found[0].format.is_identity and torch.equal(found[0].data, X) and torch.equal(found[1].data, columns.data)
    found = planes(changed_quantizer(parent(), {**RECIPE, COLUMNWISE: "high precision"}, {}))
    assert found[1].format.is_identity and torch.equal(found[0].data, rows.data)


def test_both_directions_in_high_precision_are_no_hybrid():
    made = changed_quantizer(parent(), dict.fromkeys(RECIPE, "high precision"), {})
    assert type(made) is cg.IdentityQuantizer and made.dtype is None


@pytest.mark.parametrize("result", [lambda x: 2 * x, lambda x: cg.Float8CurrentScalingQuantizer(E4M3)(2 * x)])
@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
def test_a_feature_makes_one_direction(result, direction):
    made = changed_quantizer(parent(), {**RECIPE, direction: "feature"}, {direction: Modified(result)})
    expected, found = dict(zip(RECIPE, planes(parent()), strict=True)), dict(zip(RECIPE, planes(made), strict=True))
    assert torch.equal(found[direction.other].data, expected[direction.other].data)
    decoded = cg.kernels.decode(found[direction], torch.float32)
    torch.testing.assert_close(decoded, 2 * X, rtol=0.07, atol=0.02)


def test_a_feature_may_return_codes_of_the_other_direction_alone():
    with cg.settings.override(non_tn_fp8_gemm=False):
        quantizer = cg.Float8CurrentScalingQuantizer(E4M3, columnwise=False)
        made = FeatureQuantizer(quantizer, COLUMNWISE).make_planes(X, rowwise=False, columnwise=True)
        assert torch.equal(cg.kernels.decode(made.plane(COLUMNWISE), torch.float32), quantizer(X).dequantize())


def test_columns_that_are_made_of_rows_follow_the_new_rows():
    derived = HybridQuantizer(
        rowwise_quantizer=cg.MXFP8Quantizer(E4M3),
        columnwise_quantizer=cg.MXFP8Quantizer(E4M3),
        columnwise_source="rowwise_dequantized",
    )
    _, columns = planes(
        changed_quantizer(derived, {**RECIPE, ROWWISE: "feature"}, {ROWWISE: Modified(torch.zeros_like)})
    )
    assert not cg.kernels.decode(columns, torch.float32).any()
    made = changed_quantizer(derived, {**RECIPE, COLUMNWISE: "high precision"}, {})
    assert torch.equal(planes(made)[1].data, X)  # the tensor itself, not its rounded rows


def test_new_quantizers_belong_to_the_same_tensor():
    made = changed_quantizer(parent(), {**RECIPE, ROWWISE: "feature"}, {ROWWISE: Modified(torch.neg, IDENTITY)})
    for quantizer in (made, made.rowwise_quantizer):
        assert quantizer.nonfinite == "raise" and str(quantizer.subject) == "fc1, input"
    assert made.rowwise_quantizer.makes is IDENTITY


def test_a_layer_without_a_recipe_multiplies_in_the_dtype_of_activations():
    made = changed_quantizer(None, {**RECIPE, ROWWISE: "feature"}, {ROWWISE: Modified(torch.neg)}, torch.bfloat16)
    rows, columns = planes(made)
    assert torch.equal(rows.data, -X.bfloat16()) and torch.equal(columns.data, X.bfloat16())
    assert changed_quantizer(None, RECIPE, {}, torch.bfloat16).dtype == torch.bfloat16
