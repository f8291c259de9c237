"""Formats that are only data: quantized, stored packed and decoded without a class of their own."""

import pytest
import torch

import crossgrain as cg
from crossgrain.formats import E2M3, E3M2, Element, Format, ScaleLayout, ocp_mx_format


@pytest.mark.parametrize(("name", "bits"), [("mxfp4", 4), ("mxfp6_e2m3", 6), ("mxfp6_e3m2", 6)])
def test_codes_are_really_packed(x, name, bits):
    q = cg.quantize(x, name)
    assert isinstance(q, cg.FormatTensor)
    assert q._rowwise_data.numel() == x.numel() * bits // 8
    assert q._columnwise_data.shape == (256, 128 * bits // 8)


def test_a_new_block_format_needs_no_code():
    fmt = ocp_mx_format("mxfp6_wide", E3M2)
    wide = Format("mxfp6_64", E2M3, (1, 64), "e8m0_up", ScaleLayout(pad=(128, 4)))
    x = torch.randn(64, 128)
    for new in (fmt, wide):
        q = cg.quantize(x, new)
        for direction in cg.Direction:
            assert (q.dequantize(direction=direction) - x).norm() / x.norm() < 0.1


def test_a_new_element_in_a_per_tensor_format():
    e3m4 = Element("e3m4", 3, 4, bias=3, max=30.0, specials="nan")
    x = torch.randn(5, 7)
    q = cg.quantize(x, Format("fp8_e3m4", e3m4, ragged=True))
    assert isinstance(q, cg.FormatTensor)
    assert (q.dequantize() - x).norm() / x.norm() < 0.03


def test_a_variant_of_a_native_family_gets_its_quantizer_only_if_that_makes_it():
    from crossgrain.formats import DEFAULT_SIGN_MASK, E4M3, nvfp4_format

    rotated = cg.quantizer_for(nvfp4_format(rotation=DEFAULT_SIGN_MASK))
    assert isinstance(rotated, cg.NVFP4Quantizer)
    assert rotated.with_rht
    assert isinstance(cg.quantizer_for(nvfp4_format(rotation=5)), cg.FormatQuantizer)
    unusual = Format("mxfp8_64", E4M3, (1, 64), "e8m0_up", ScaleLayout(pad=(128, 4)), transposes=False)
    assert isinstance(cg.quantizer_for(unusual), cg.FormatQuantizer)


def test_stochastic_rounding_for_any_element(x):
    torch.manual_seed(3)
    quantizer = cg.FormatQuantizer("mxfp6_e2m3", stochastic_rounding=True)
    q = quantizer(x)
    torch.manual_seed(3)
    assert torch.equal(quantizer(x)._rowwise_data, q._rowwise_data)
    assert not torch.equal(quantizer(x)._rowwise_data, q._rowwise_data)
