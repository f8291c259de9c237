"""Quantizing and decoding apart from a recipe."""

import pytest
import torch

import crossgrain as cg
from crossgrain.compat.debug.fake_quant import QUANT_FORMATS, fake_quantize, per_tensor_cast
from crossgrain.planes import COLUMNWISE

X = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name, fmt", QUANT_FORMATS.items())
def test_formats_of_transformer_engine_are_along_rows(name, fmt):
    expected = cg.quantize(X, fmt).dequantize()
    assert torch.equal(fake_quantize(X, name), expected) and torch.equal(fake_quantize(X, name, COLUMNWISE), expected)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "mxfp4", "fp8_block"])
def test_formats_of_crossgrain_are_along_the_direction_of_the_gemm(fmt):
    expected = cg.quantize(X, fmt).dequantize(direction=COLUMNWISE)
    assert torch.equal(fake_quantize(X, fmt, COLUMNWISE), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["MXFP8E4M3", "nvfp4", "FP8E5M2"])
def test_any_shape_and_dtype_comes_back(name, dtype):
    x = X[:42].reshape(2, 3, 7, 256)[..., :100].to(dtype)
    found = fake_quantize(x, name)
    assert found.shape == x.shape and found.dtype == dtype
    torch.testing.assert_close(found, x, rtol=0.3, atol=0.6 if name == "nvfp4" else 0.1)


def test_a_margin_doubles_the_scale():
    plain, wide = (per_tensor_cast(X, cg.DType.kFloat8E4M3, margin=margin)._scale_inv for margin in (0, 1))
    assert torch.equal(wide, 2 * plain)
    assert torch.equal(
        fake_quantize(X, "FP8E4M3", margin=1), per_tensor_cast(X, cg.DType.kFloat8E4M3, margin=1).dequantize()
    )


def test_nans_are_seen_as_the_policy_says():
    x = X.clone()
    x[3, 5] = torch.inf
    assert fake_quantize(x, "FP8E4M3", nonfinite="saturate").isfinite().all()
    assert not fake_quantize(x, "FP8E4M3", nonfinite="propagate").isfinite().all()


def test_unknown_formats_and_margins_are_refused():
    with pytest.raises(ValueError, match="no quant_format 'identity'; there are FP8E4M3"):
        fake_quantize(X, "identity")
    with pytest.raises(
        ValueError, match="margin is only for formats with one scale for the whole tensor, not for mxfp8"
    ):
        fake_quantize(X, "mxfp8", margin=1)
    with pytest.raises(
        ValueError, match="margin is only for FP8 with one scale for the whole tensor, not for hifloat8"
    ):
        fake_quantize(X, "hifloat8", margin=1)
