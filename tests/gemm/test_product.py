"""GEMMs of planes: against the golden products and float64, in every option."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.formats import IDENTITY
from crossgrain.gemm import gemm
from crossgrain.gemm.operands import GEMMS
from crossgrain.planes import Plane

from ..common.golden_cases import encoded, golden
from ..common.quantizers import QUANTIZERS
from ..kernels.test_golden_hybrid_gemm import GEMM_RECIPES, bf16_order

M, K, N = 32, 64, 96
SHAPES = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}
GOLDEN_NAMES = {"input": "x", "weight": "w", "grad_output": "dy"}
FAMILIES = {  # quantizers of input, weight, grad_output
    "fp8": ("fp8", "fp8", "fp8_e5m2"),
    "fp8_delayed": ("fp8_delayed", "fp8_delayed", "fp8_delayed"),
    "fp8_block": ("fp8_block", "fp8_block_2d", "fp8_block"),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8_e5m2"),
    "mxfp4": ("mxfp4", "mxfp8", "mxfp4_sr"),
    "nvfp4": ("nvfp4", "nvfp4_2d", "nvfp4"),
    "nvfp4_row_scaled": ("nvfp4_row_scaled", "nvfp4", "nvfp4_row_scaled"),
    "nvfp4_all_row_scaled": ("nvfp4_row_scaled", "nvfp4_row_scaled", "nvfp4_row_scaled"),
    "nvfp4_4over6": ("nvfp4_4over6_mse", "nvfp4_2d_max256", "nvfp4"),
    "identity": ("identity", "identity_bf16", "identity"),
}


@pytest.fixture(params=list(GEMMS))
def which(request):
    return request.param


def planes_of(which, family, shapes=SHAPES, dtype=torch.float32, spread=1.0):
    """The two operands of a GEMM, with magnitudes that make the scales matter."""
    names = dict(zip(SHAPES, FAMILIES[family], strict=True))
    planes = []
    for tensor, direction in GEMMS[which].items():
        numbers = (torch.randn(shapes[tensor]) * spread).to(dtype)
        planes.append(QUANTIZERS[names[tensor]]()(numbers).plane(direction))
    return planes


def decoded(plane):
    """The operand in float64 as the format defines it."""
    if plane.format.is_identity:
        values = plane.data.reshape(plane.shape).double()
        return values if plane.direction is ROWWISE else values.t()
    return kernels.decode_operand(plane).double()


def exact(a, b):
    """The product in float64 and how far fp32 sums of the same products may be from it."""
    a, b = decoded(a), decoded(b)
    return a @ b.t(), (a.shape[1] + 4) * torch.finfo(torch.float32).eps * (a.abs() @ b.abs().t())


def assert_close(out, expected):
    value, bound = expected
    assert ((out.double() - value).abs() <= bound).all()


# ---- numbers ------------------------------------------------------------------------------------------


@golden("gemm.npz")
def test_golden(case):
    encodings = dict(zip(SHAPES, GEMM_RECIPES[case.name], strict=True))
    for which, result in {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}.items():
        planes = [
            encoded(case.tensor(GOLDEN_NAMES[tensor]), encodings[tensor][direction is COLUMNWISE], direction)
            for tensor, direction in GEMMS[which].items()
        ]
        out = gemm(which, *planes)
        reference = torch.from_numpy(case.input(f"{result}_f64"))
        assert_close(out, (reference, exact(*planes)[1]))
        if f"{result}_ref_fp32" in case:
            reference = case.input(f"{result}_ref_fp32")
            assert np.abs(out.numpy() - reference).max() <= 1e-5 * np.abs(reference).max()
            steps = bf16_order(gemm(which, *planes, out_dtype=torch.bfloat16)) - bf16_order(
                case.tensor(f"{result}_ref_bf16")
            )
            assert steps.abs().max() <= 1
    case.assert_complete()


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("family", FAMILIES)
def test_is_the_product_of_what_the_planes_decode_to(which, family, spread):
    a, b = planes_of(which, family, spread=spread)
    assert_close(gemm(which, a, b), exact(a, b))


@pytest.mark.parametrize("largest", [3.0, 1e-4])
def test_nvfp4_codes_and_block_scales_are_exact_and_global_scales_come_at_the_end(largest):
    """One block per row: sums of codes times block scales are exact in fp32, so all that rounds is the scaling."""
    x, w = torch.randn(32, 16) * largest, torch.randn(48, 16)
    planes = [QUANTIZERS["nvfp4"]()(t).plane(ROWWISE) for t in (x, w)]
    at_one = torch.tensor([6.0 * 448.0])  # under this amax the global scale is one
    a, b = (decoded(replace(plane, amax=at_one)) for plane in planes)
    total = a @ b.t()
    assert torch.equal(total, total.float().double())
    scale = planes[0].amax.double() * planes[1].amax.double() / (6.0 * 448.0) ** 2
    expected = total * scale.float().double()
    assert ((gemm("fprop", *planes).double() - expected).abs() <= expected.abs() * 2**-24).all()


def test_rotated_operands_are_multiplied_rotated():
    x, dy = torch.randn(M, K), torch.randn(M, N)
    rotated = [QUANTIZERS["nvfp4_rht"]()(t).plane(COLUMNWISE) for t in (dy, x)]
    assert_close(gemm("wgrad", *rotated), exact(*rotated))
    error = (gemm("wgrad", *rotated) - dy.t() @ x).norm() / (dy.t() @ x).norm()
    assert error < 0.2


def test_operands_rotated_differently_are_unrotated_if_mixing_is_allowed():
    x, dy = torch.randn(M, K), torch.randn(M, N)
    a, b = QUANTIZERS["nvfp4_rht"]()(dy).plane(COLUMNWISE), QUANTIZERS["nvfp4"]()(x).plane(COLUMNWISE)
    with pytest.raises(ValueError, match=r"wgrad multiplies grad_output columnwise \(nvfp4_rht\).*rht"):
        gemm("wgrad", a, b)
    error = (gemm("wgrad", a, b, allow_mixed=True) - dy.t() @ x).norm() / (dy.t() @ x).norm()
    assert error < 0.2


def test_zero_stays_zero_under_scales_whose_product_is_beyond_fp32():
    x, w = torch.full((16, 16), 1e25), torch.full((16, 16), 1e25)
    x[3] = 0
    planes = [QUANTIZERS["fp8"]()(t).plane(ROWWISE) for t in (x, w)]
    out = gemm("fprop", *planes)
    assert (out[3] == 0).all() and out[4].isinf().all()


# ---- operand dtype ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mxfp8", "mxfp4", "identity", "nvfp4", "fp8", "fp8_block"])
def test_bf16_and_fp32_operands_give_the_same_bf16_result(which, family):
    """Only the order of summation may differ, and a number at a tie of bf16 fall either way."""
    shapes = dict.fromkeys(SHAPES, (32, 32))
    a, b = planes_of(which, family, shapes, dtype=torch.bfloat16)
    with cg.settings.override(gemm_operand_dtype=torch.float32):
        wide = gemm(which, a, b, out_dtype=torch.bfloat16)
    with cg.settings.override(gemm_operand_dtype=torch.bfloat16):
        narrow = gemm(which, a, b, out_dtype=torch.bfloat16)
    value, bound = exact(a, b)
    for out in (wide, narrow):
        assert out.dtype == torch.bfloat16
        assert ((out.double() - value).abs() <= bound + value.abs() * 2**-8).all()
    assert (bf16_order(wide) - bf16_order(narrow)).abs().max() <= 1


@pytest.mark.parametrize("exact_in_bf16", [True, False])
def test_bf16_operands_are_used_only_where_no_bit_is_lost(monkeypatch, exact_in_bf16):
    seen = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **options: seen.append(a.dtype) or real(a, b, **options))
    x = torch.ones(16, 16) * (1.0 if exact_in_bf16 else 1.0 + 2**-10)
    with cg.settings.override(gemm_operand_dtype=torch.bfloat16):
        gemm("fprop", x, x, out_dtype=torch.bfloat16)
    assert seen == [torch.bfloat16 if exact_in_bf16 else torch.float32]


def test_the_cpu_decides_unless_told(monkeypatch):
    module = sys.modules["crossgrain.gemm.product"]
    seen = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **options: seen.append(a.dtype) or real(a, b, **options))
    x = torch.ones(4, 4)
    for fast in (False, True):
        monkeypatch.setattr(module, "has_fast_bf16", lambda fast=fast: fast)
        gemm("fprop", x, x, out_dtype=torch.bfloat16)
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    "limit, fast",
    [
        (None, True),
        ("ALL", True),
        ("avx512_core_amx", True),
        ("AVX512_CORE_BF16", False),
        ("AVX2", False),
        ("avx10_1_512", False),
        ("AVX10_1_512_AMX", True),
        ("", True),
    ],
)
def test_bf16_is_fast_with_amx_unless_onednn_may_not_use_it(limit, fast, monkeypatch):
    module = sys.modules["crossgrain.gemm.product"]
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    for amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert module.has_fast_bf16.__wrapped__() is (fast and amx)


def test_double_precision_stays():
    x, w = torch.randn(3, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(gemm("fprop", x, w, out_dtype=torch.float64), x @ w.t())
    out = torch.ones(3, 4, dtype=torch.float64)
    gemm("fprop", x, w, out=out, accumulate=True, alpha=2.0, beta=3.0, bias=torch.ones(4))
    torch.testing.assert_close(out, 3 + 2 * (x @ w.t()) + 1)


@pytest.mark.parametrize("family", ["fp8", "fp8_delayed", "nvfp4", "nvfp4_row_scaled"])
def test_a_scaled_product_is_rounded_before_it_is_added(family, which):
    """So that gradients added in place are those that autograd adds."""
    a, b = planes_of(which, family)
    product = gemm(which, a, b, out_dtype=torch.float32)
    total = torch.randn_like(product)
    expected = total + product
    gemm(which, a, b, out=total, accumulate=True)
    assert torch.equal(total, expected)


def test_torch_autocast_does_not_reach_the_product(which):
    for family in ("mxfp8", "nvfp4_row_scaled", "fp8"):
        a, b = planes_of(which, family)
        plain = gemm(which, a, b)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(gemm(which, a, b), plain)


# ---- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mxfp8", "fp8", "nvfp4", "nvfp4_row_scaled", "nvfp4_all_row_scaled", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (0.5, -2.0)])
def test_epilogue(family, dtype, accumulate, with_bias, alpha, beta):
    a, b = planes_of("fprop", family)
    bias = torch.randn(N) if with_bias else None
    before = torch.randn(M, N).to(dtype)
    out = before.clone() if accumulate else torch.full((M, N), float("nan"), dtype=dtype)
    result = gemm("fprop", a, b, out=out, bias=bias, accumulate=accumulate, alpha=alpha, beta=beta)
    assert result is out
    value, bound = exact(a, b)
    value = alpha * value + (bias.double() if with_bias else 0) + (beta * before.double() if accumulate else 0)
    slack = value.abs() * (2**-8 if dtype == torch.bfloat16 else 0) + 1e-5 * value.abs().max()
    assert ((out.double() - value).abs() <= bound + slack).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_dtype_is_one_rounding_of_the_fp32_result(which, dtype):
    a, b = planes_of(which, "mxfp8")
    with cg.settings.override(gemm_operand_dtype=torch.float32):
        out = gemm(which, a, b, out_dtype=dtype)
        assert torch.equal(out, gemm(which, a, b).to(dtype))


def test_results_do_not_share_memory_with_later_calls(which):
    a, b = planes_of(which, "mxfp8")
    first = [gemm(which, a, b), gemm(which, a, b, out_dtype=torch.bfloat16)]
    kept = [t.clone() for t in first]
    c, d = planes_of(which, "nvfp4_row_scaled")
    gemm(which, c, d), gemm(which, c, d, out_dtype=torch.bfloat16)
    assert all(torch.equal(t, k) for t, k in zip(first, kept, strict=True))


def test_no_gradient_leaks_from_operands_or_bias():
    x, w, bias = (torch.randn(*shape, requires_grad=True) for shape in ((4, 8), (6, 8), (6,)))
    out = torch.zeros(4, 6)
    assert not gemm("fprop", x, w, bias=bias).requires_grad
    assert not gemm("fprop", x, w, bias=bias, out=out, accumulate=True).requires_grad


def test_empty_sums_and_empty_results():
    assert torch.equal(gemm("fprop", torch.ones(3, 0), torch.ones(2, 0)), torch.zeros(3, 2))
    bias = torch.ones(2)
    assert torch.equal(gemm("fprop", torch.ones(3, 0), torch.ones(2, 0), bias=bias), torch.ones(3, 2))
    kept = torch.ones(3, 2)
    gemm("fprop", torch.ones(3, 0), torch.ones(2, 0), out=kept, accumulate=True)
    assert torch.equal(kept, torch.ones(3, 2))
    assert gemm("wgrad", torch.ones(0, 4), torch.ones(0, 5)).shape == (4, 5)
    empty = [QUANTIZERS["mxfp8"]()(torch.ones(0, 32)).plane(COLUMNWISE) for _ in range(2)]
    assert torch.equal(gemm("wgrad", *empty), torch.zeros(32, 32))


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operand", [0, 1])
def test_a_plane_of_the_other_direction_is_refused(which, operand):
    planes = planes_of(which, "mxfp8")
    tensor, direction = list(GEMMS[which].items())[operand]
    planes[operand] = QUANTIZERS["mxfp8"]()(torch.randn(32, 32)).plane(direction.other)
    with pytest.raises(ValueError, match=f"{which} reads {tensor} {direction.value}, but got its"):
        gemm(which, *planes)


def test_mixed_families_are_refused_unless_asked_for(which):
    a, b = planes_of(which, "mxfp8")[0], planes_of(which, "nvfp4")[1]
    with pytest.raises(ValueError, match=f"{which} multiplies .*mxfp8.*nvfp4.*allow_mixed"):
        gemm(which, a, b)
    assert_close(gemm(which, a, b, allow_mixed=True), exact(a, b))


@pytest.mark.parametrize("fmt", ["mxfp8", "identity"])
def test_stale_planes_are_refused(fmt):
    """Also those that keep the numbers as they are, which no kernel looks at."""
    children = {"rowwise_quantizer": QUANTIZERS["mxfp8"](), "columnwise_quantizer": QUANTIZERS[fmt]()}
    w = cg.HybridQuantizer(**children)(torch.randn(32, 32))
    alias = w.detach()
    alias.update_usage(columnwise_usage=False)
    alias.copy_(torch.randn(32, 32))
    with pytest.raises(RuntimeError, match="columnwise .* stale"):
        gemm("dgrad", torch.randn(32, 32), w.plane(COLUMNWISE), allow_mixed=True)


def test_sizes_and_names_are_checked():
    x = torch.ones(4, 8)
    with pytest.raises(
        ValueError, match=r"fprop: the shapes of input \[4, 8\] and weight \[4, 6\].*8 elements of one and 6"
    ):
        gemm("fprop", x, torch.ones(4, 6))
    with pytest.raises(ValueError, match="accumulate=True needs out="):
        gemm("fprop", x, x, accumulate=True)
    with pytest.raises(ValueError, match=r"the result has shape \[4, 4\], but out has shape \[4, 5\]"):
        gemm("fprop", x, x, out=torch.ones(4, 5))
    with pytest.raises(ValueError, match="must be one of fprop, dgrad, wgrad, got 'gprop'"):
        gemm("gprop", x, x)


def test_a_plain_tensor_is_an_identity_plane_of_either_direction():
    dy, x = torch.randn(6, 4), torch.randn(6, 5)
    planes = [Plane(IDENTITY, ROWWISE, tuple(t.shape), t) for t in (dy, x)]
    torch.testing.assert_close(gemm("wgrad", *planes), dy.t() @ x)
    torch.testing.assert_close(gemm("wgrad", dy, x), dy.t() @ x)
