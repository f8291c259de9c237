"""The GEMMs of GPUs on tensors of the CPU: decoded operands give the CPU's numbers, and settings are followed."""

from dataclasses import replace

import pytest
import torch

import crossgrain as cg
from crossgrain.gemm import full_precision, gemm
from crossgrain.gemm.native import Gpu, gpu_of, machine
from crossgrain.gemm.native import gpu as gpu_module
from crossgrain.gemm.operands import GEMMS
from crossgrain.planes import COLUMNWISE, ROWWISE
from crossgrain.runtime import gpu_capability

from ..common.quantizers import QUANTIZERS
from .test_product import FAMILIES, planes_of

A100 = Gpu((8, 0))


def never(call):
    raise AssertionError("nothing is native here")


@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_products_have_the_bits_of_the_cpu(family, which):
    """The sums are those of the same BLAS here, so operands that were not exact in bf16 would show."""
    a, b = planes_of(which, family)
    with cg.settings.override(gemm_operand_dtype=torch.float32):  # else the CPU multiplies codes, with other sums
        expected = gemm(which, a, b, alpha=0.5)
    with machine.replaced(A100, never):
        assert torch.equal(gemm(which, a, b, alpha=0.5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_results_are_written_to_what_is_given(dtype):
    a, b = planes_of("fprop", "nvfp4_row_scaled")
    start = torch.randn(96, 32).to(dtype).t()
    with machine.replaced(A100):
        wanted = gemm("fprop", a, b) + 2 * start.float()
        out = start.clone(memory_format=torch.preserve_format)
        assert gemm("fprop", a, b, out=out, accumulate=True, beta=2.0) is out
        assert out.stride() == start.stride() and torch.equal(out, wanted.to(dtype))
        assert torch.equal(gemm("fprop", a, b, out=out), gemm("fprop", a, b, out_dtype=dtype))


def test_operands_rotated_differently_are_unrotated():
    dy, x = torch.randn(32, 96), torch.randn(32, 64)
    a, b = QUANTIZERS["nvfp4_rht"]()(dy).plane(COLUMNWISE), QUANTIZERS["nvfp4"]()(x).plane(COLUMNWISE)
    expected = gemm("wgrad", a, b, allow_mixed=True)
    with machine.replaced(Gpu((10, 0)), never):
        assert torch.equal(gemm("wgrad", a, b, allow_mixed=True), expected)


def test_plain_tensors_of_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x, w = torch.randn(8, 16).to(dtype), torch.randn(4, 16).to(dtype)
        with machine.replaced(A100), cg.settings.override(native_gemms=True):  # which is about codes
            found = gemm("fprop", x, w, out_dtype=dtype)
        torch.testing.assert_close(found, (x.double() @ w.double().t()).to(dtype))


def test_empty_sums_are_zero():
    empty = [QUANTIZERS["mxfp8"]()(torch.ones(0, 32)).plane(COLUMNWISE) for _ in range(2)]
    with machine.replaced(Gpu((10, 0)), never), cg.settings.override(native_gemms=True):
        assert torch.equal(gemm("wgrad", *empty), torch.zeros(32, 32))


def test_torch_autocast_does_not_reach_the_product():
    for family in ("mxfp8", "fp8_block"):
        a, b = planes_of("fprop", family)
        with machine.replaced(A100):
            plain = gemm("fprop", a, b)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(gemm("fprop", a, b), plain)


def test_fp32_operands_are_multiplied_without_tf32(monkeypatch):
    entered = []
    real = full_precision.full_fp32
    monkeypatch.setattr("crossgrain.gemm.on_gpu.full_fp32", lambda: entered.append(1) or real())
    for family, times in (("fp8_block", 1), ("mxfp8", 0)):
        entered.clear()
        with machine.replaced(A100):
            gemm("fprop", *planes_of("fprop", family))
        assert len(entered) == times


# ---- settings -----------------------------------------------------------------------------------------


def test_native_gemms_true_refuses_to_decode_and_says_why():
    a, b = planes_of("dgrad", "mxfp8")
    message = (
        r"dgrad multiplies grad_output rowwise \(mxfp8_e5m2 \[32, 96\]\) by weight columnwise \(mxfp8 \[96, 64\]\), "
        r"which cannot be done natively: MXFP8 needs compute capability 10.0, this is compute capability 8.0. Change "
        r"the format or the shape, or set settings.native_gemms to None"
    )
    with cg.settings.override(native_gemms=True), machine.replaced(A100), pytest.raises(RuntimeError, match=message):
        gemm("dgrad", a, b)
    with cg.settings.override(native_gemms=True), pytest.raises(RuntimeError, match="the operands are on the CPU"):
        gemm("dgrad", a, b)
    with cg.settings.override(native_gemms=True):
        gemm("fprop", torch.ones(4, 4), torch.ones(4, 4))


def test_native_gemms_false_decodes_everywhere():
    a, b = planes_of("fprop", "fp8")
    with machine.replaced(Gpu((9, 0)), never), cg.settings.override(native_gemms=False):
        gemm("fprop", a, b)
    with machine.replaced(Gpu((9, 0)), never), pytest.raises(AssertionError, match="nothing is native"):
        gemm("fprop", a, b)


def test_planes_without_memory_or_with_too_little_are_refused_before_they_are_multiplied():
    x, w = (QUANTIZERS["mxfp8"]()(torch.randn(32, 32)).plane(ROWWISE) for _ in range(2))
    with machine.replaced(Gpu((10, 0)), never):
        with pytest.raises(ValueError, match="needs codes of torch.uint8, 1024 bytes"):
            gemm("fprop", x, replace(w, data=w.data[:16]))
        w.data.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="has no memory"):
            gemm("fprop", x, w)


# ---- devices ------------------------------------------------------------------------------------------


def test_the_gpu_is_that_of_the_tensor_and_not_the_current_one(monkeypatch):
    asked = []

    def capability(index):
        asked.append(index)
        return (9, 0) if index == 1 else (8, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    for cache in (gpu_capability._capability, gpu_module._gpu):
        cache.cache_clear()
    try:
        for _ in range(2):
            assert gpu_of(torch.device("cuda", 1)).capability == (9, 0)
            assert gpu_of(torch.device("cuda")).capability == (8, 0)
        assert asked == [1, 0]
        assert gpu_of(torch.device("cpu")) is None
    finally:
        for cache in (gpu_capability._capability, gpu_module._gpu):
            cache.cache_clear()


def test_without_a_gpu_it_is_the_one_whose_rules_apply():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with cg.settings.override(compute_capability=(9, 0)):
        found = gpu_of(torch.device("cuda"))
    assert found == Gpu((9, 0), cuda=(0, 0), has_kernels=False)
