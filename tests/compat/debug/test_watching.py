"""What becomes of a call whose operands features change. With nvdlfw_inspect: tests/clients/test_nvdlfw_inspect.py."""

import pytest
import torch

import crossgrain as cg
from crossgrain.compat.debug.plans import plan_of
from crossgrain.compat.debug.quantizers import FeatureQuantizer
from crossgrain.compat.debug.watching import change_operands
from crossgrain.linear.call import LinearCall
from crossgrain.linear.padding import NO_PADDING, Padding, padding_for

E4M3 = cg.DType.kFloat8E4M3


def call_of(quantizer):
    made = LinearCall(torch.float32, quantizer(), quantizer(), quantizer(), layer="fc1")
    made.padding = padding_for(made.input, made.weight, made.grad_output)
    return made


def changed(call, answers, weight=None):
    """The call, after features have given some answers."""

    def says(name, **about):
        return answers.get((name, *about.values()), (name == "fp8_gemm_enabled", None))

    plan, _ = plan_of("fc1", 0, says)
    quantizers = {"activation": call.input, "weight": call.weight, "gradient": call.grad_output}
    asked = []

    def ask(layer, name, iteration, **about):
        asked.append((layer, name, about["tensor_name"], about["gemm"]))
        return about["tensor"][:1] if name == "modify_tensor" else None

    change_operands(call, plan, torch.zeros(48, 40) if weight is None else weight, quantizers, ask)
    return asked


def test_what_is_in_high_precision_needs_no_padding():
    call = call_of(lambda: cg.MXFP8Quantizer(E4M3))
    assert call.padding == Padding(1, 32, 32, 32)
    changed(call, {("fp8_gemm_enabled", gemm): (False, 1) for gemm in ("fprop", "dgrad", "wgrad")})
    assert call.padding == NO_PADDING and type(call.input) is cg.IdentityQuantizer


def test_planes_of_a_weight_that_stay_keep_their_padding():
    call = call_of(lambda: cg.MXFP8Quantizer(E4M3))
    call.padding, call.quantized_weight = Padding(1, 32, 128, 64), "planes that were padded so"
    asked = changed(call, {("modify_tensor_enabled", "activation", "fprop"): (True, 1)})
    assert call.padding == Padding(1, 32, 128, 64) and call.quantized_weight == "planes that were padded so"
    assert asked == [("fc1", "check_modify_tensor", "activation", "fprop")]
    assert isinstance(call.input.rowwise_quantizer, FeatureQuantizer)


def test_a_feature_must_keep_the_shape():
    call = call_of(lambda: cg.MXFP8Quantizer(E4M3))
    changed(call, {("modify_tensor_enabled", "activation", "fprop"): (True, 1)})
    with pytest.raises(
        ValueError, match=r"layer 'fc1': a debug feature made a tensor of shape \[1, 64\] of the activation"
    ):
        call.input.make_planes(torch.zeros(32, 64), rowwise=True, columnwise=False)


def test_layers_in_high_precision_stay_as_they_are_without_a_feature_that_makes_operands():
    call = LinearCall(torch.float32)
    changed(call, {("fp8_gemm_enabled", "fprop"): (False, 1)})
    assert call.input is None and call.weight is None and call.grad_output is None
    changed(call, {("modify_tensor_enabled", "gradient", "wgrad"): (True, 1)})
    assert type(call.input) is type(call.weight) is cg.IdentityQuantizer and call.input.dtype == torch.float32
    assert isinstance(call.grad_output.columnwise_quantizer, FeatureQuantizer)
