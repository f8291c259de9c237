"""GEMMs of the library through a twin of ``scaled_mm``: the same numbers as decoding, in every format and option."""

from dataclasses import replace

import pytest
import torch

import crossgrain as cg
from crossgrain import kernels
from crossgrain.gemm import gemm
from crossgrain.gemm.operands import GEMMS
from crossgrain.planes import COLUMNWISE, ROWWISE
from crossgrain.planes.plane import stored_by_columns
from crossgrain.planes.slicing import slice_plane

from ...common.quantizers import QUANTIZERS
from .operands import B200, FAMILIES, H100, planes_of, shapes_of, sizes_of, twin_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OPTIONS = [  # dtype of the result, dtype of the bias, beta, alpha
    (FP32, None, None, 1.0),
    (FP32, BF16, None, 0.7),
    (FP32, FP32, -0.3, 0.7),
    (FP32, None, 1.0, 1.0),
    (BF16, None, None, 0.7),
    (BF16, BF16, None, 1.0),
    (BF16, FP32, None, 1.0),
    (BF16, BF16, -0.3, 0.7),
    (FP16, None, 1.0, 1.0),
    (FP16, FP16, None, 0.7),
]


def both(which, a, b, gpu, out=None, **options):
    """The result of a native GEMM, and of the same GEMM with decoded operands."""
    results = []
    for native in (True, False):
        own = {} if out is None else {"out": out.clone()}
        with twin_of(gpu) as twin, cg.settings.override(native_gemms=native):
            results.append(gemm(which, a, b, **own, **options))
        assert len(twin.calls) == native
    return results


def bound(a, b, alpha=1.0):
    """How far two fp32 sums of the same products may be from each other: a rounding for each addition, twice."""
    left, right = (kernels.decode_operand(plane).abs().double() for plane in (a, b))
    return 2 * (left.shape[1] + 4) * torch.finfo(torch.float32).eps * abs(alpha) * (left @ right.t())


@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_native_gemm_is_the_decoded_one_up_to_the_order_of_sums(family, which):
    a, b = planes_of(which, family)
    native, decoded = both(which, a, b, FAMILIES[family][1])
    assert ((native.double() - decoded).abs() <= bound(a, b)).all()


def few_bits(shape):
    """Numbers of one sign and size: their products have so few bits that all sums of them are exact in fp32."""
    return torch.randint(4, 8, shape).float()


@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_where_sums_are_exact_both_give_the_same_bits_with_every_option(family, which):
    shapes = shapes_of(*sizes_of(family, which))
    a, b = planes_of(which, family, {tensor: few_bits(shape) for tensor, shape in shapes.items()})
    rows, columns = a.operand_shape[0], b.operand_shape[0]
    for dtype, bias_dtype, beta, alpha in OPTIONS:
        bias = None if bias_dtype is None else torch.randn(columns).to(bias_dtype)
        start = torch.randn(rows, columns).to(dtype)
        more = {"accumulate": True, "beta": beta} if beta is not None else {}
        native, decoded = both(which, a, b, FAMILIES[family][1], out=start, bias=bias, alpha=alpha, **more)
        assert native.dtype == dtype and torch.equal(native, decoded), (dtype, bias_dtype, beta, alpha)


def test_results_that_scaled_mm_can_finish_are_its_own(monkeypatch):
    """Only what it cannot do goes through an epilogue."""
    seen = []
    real = kernels.epilogue
    monkeypatch.setattr(kernels, "epilogue", lambda *arguments: seen.append(1) or real(*arguments))
    bf16, fp32 = torch.randn(224).bfloat16(), torch.randn(224)
    cases = [
        ("nvfp4", {"out_dtype": torch.bfloat16, "bias": bf16, "alpha": 0.5}, 0),
        ("fp8", {"out_dtype": torch.float16, "alpha": 0.5}, 0),
        ("mxfp8", {"out_dtype": torch.float32}, 0),
        ("mxfp8", {"out_dtype": torch.bfloat16, "alpha": 0.5}, 1),
        ("mxfp8", {"out_dtype": torch.bfloat16, "bias": fp32}, 1),
        ("mxfp8", {"out_dtype": torch.float32, "bias": bf16}, 1),
        ("mxfp8", {"out_dtype": torch.bfloat16, "bias": torch.randn(448).bfloat16()[::2]}, 1),
    ]
    for family, options, epilogues in cases:
        a, b = planes_of("fprop", family)
        with twin_of(FAMILIES[family][1]) as twin:
            gemm("fprop", a, b, **options)
        assert (len(twin.calls), len(seen)) == (1, epilogues), (family, options)
        seen.clear()


@pytest.mark.parametrize("which", GEMMS)
def test_mxfp8_columns_may_be_stored_either_way(which):
    planes = planes_of(which, "mxfp8")
    turned = [
        plane if plane.direction is ROWWISE else replace(plane, data=stored_by_columns(torch.empty_like(plane.data)))
        for plane in planes
    ]
    for plane, own in zip(planes, turned, strict=True):
        own.data.copy_(plane.data)
    with twin_of(B200):
        assert torch.equal(gemm(which, *turned), gemm(which, *planes))


@pytest.mark.parametrize(("family", "gpu"), [("fp8_block", H100), ("mxfp8", B200), ("nvfp4", B200)])
def test_slices_are_multiplied_as_copies_of_them_are(family, gpu):
    """Their codes and scales have the strides of the whole tensor."""
    x, w = (QUANTIZERS[name]()(torch.randn(512, 384)) for name in FAMILIES[family][0][:2])
    x, w = x.plane(ROWWISE), w.plane(ROWWISE)
    for start, stop in ((128, 384), (256, 512)):
        part = slice_plane(w, (512, 384), 0, start, stop)
        with twin_of(gpu):
            whole = gemm("fprop", x, w)
            assert torch.equal(gemm("fprop", x, part), whole[:, start:stop])
            assert torch.equal(gemm("fprop", slice_plane(x, (512, 384), 0, start, stop), w), whole[start:stop])


def test_one_buffer_of_fp8_serves_both_directions():
    """With a transposed copy for the GEMM, because hardware reads rows."""
    with cg.settings.override(non_tn_fp8_gemm=True):
        dy, w = (QUANTIZERS["fp8"]()(torch.randn(96, 96)) for _ in range(2))
        a, b = dy.plane(ROWWISE), w.plane(COLUMNWISE)
        native, decoded = both("dgrad", a, b, B200)
    assert b.data is w.plane(ROWWISE).data and not b.transposed
    assert ((native.double() - decoded).abs() <= bound(a, b)).all()


def test_zero_stays_zero_under_scales_whose_product_is_beyond_fp32_if_it_is_decoded():
    x, w = torch.full((16, 16), 1e25), torch.full((16, 16), 1e25)
    x[3] = 0
    planes = [QUANTIZERS["fp8"]()(t).plane(ROWWISE) for t in (x, w)]
    with twin_of(H100), cg.settings.override(native_gemms=False):
        out = gemm("fprop", *planes)
    assert (out[3] == 0).all() and out[4].isinf().all()
