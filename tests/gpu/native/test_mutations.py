"""The twin notices what could be wrong with a call: each of these changes is refused, or gives other numbers."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

import crossgrain as cg
from crossgrain.formats import mxfp8_format
from crossgrain.gemm import gemm
from crossgrain.gemm.native import scaled_call
from crossgrain.gemm.native.scaled_call import run
from crossgrain.kernels import swizzle_scales
from crossgrain.planes import COLUMNWISE, ROWWISE

from ...common.quantizers import QUANTIZERS
from .operands import B200, FAMILIES, planes_of, twin_of
from .test_products import bound
from .twin import Refused, Twin


def as_called(call, twin):
    return run(call, twin.new_interface, twin.old_interface)


@pytest.fixture(params=["mxfp8", "nvfp4"])
def right(request):
    """Operands, their call, and what comes out of it."""
    a, b = planes_of("fprop", request.param)
    call, twin = scaled_call(a, b, torch.float32), Twin((10, 0))
    result = as_called(call, twin)
    with twin_of(B200), cg.settings.override(native_gemms=False):
        assert ((result.double() - gemm("fprop", a, b)).abs() <= bound(a, b)).all()
    return a, b, call, twin, result


def differs(result, right):
    a, b, *_, expected = right
    return bool(((result.double() - expected).abs() > bound(a, b)).any())


def test_scales_that_are_not_swizzled(right):
    a, _, call, twin, _ = right
    rows, blocks = a.operand_scales().shape
    plain = torch.zeros_like(call.scale_a[0].view(torch.uint8))
    plain[:rows, :blocks] = a.operand_scales()
    wrong = call._replace(scale_a=[plain.view(call.scale_a[0].dtype), *call.scale_a[1:]])
    assert differs(as_called(wrong, twin), right)


def test_scales_that_are_swizzled_twice(right):
    _, _, call, twin, _ = right
    twice = swizzle_scales(call.scale_b[0].view(torch.uint8)).view(call.scale_b[0].dtype)
    assert differs(as_called(call._replace(scale_b=[twice, *call.scale_b[1:]]), twin), right)


def test_scales_of_the_other_direction():
    tensor = QUANTIZERS["mxfp8"]()(torch.randn(128, 128) * torch.logspace(-3, 3, 128))
    row, column = tensor.plane(ROWWISE), tensor.plane(COLUMNWISE)
    w = QUANTIZERS["mxfp8"]()(torch.randn(128, 128)).plane(ROWWISE)
    mixed = replace(row, scale=column.scale.t().contiguous())
    results = [as_called(scaled_call(plane, w, torch.float32), Twin((10, 0))) for plane in (row, mixed)]
    assert ((results[0].double() - results[1]).abs() > bound(row, w)).any()


def test_operands_in_the_wrong_order():
    a, b = (QUANTIZERS["mxfp8"]()(torch.randn(128, 128)).plane(ROWWISE) for _ in range(2))
    right, wrong = (as_called(scaled_call(*pair, torch.float32), Twin((10, 0))) for pair in ((a, b), (b, a)))
    assert ((right.double() - wrong).abs() > bound(a, b)).any()


def test_operands_that_do_not_fit(right):
    *_, call, twin, _ = right
    with pytest.raises(Refused, match="shapes cannot be multiplied"):
        as_called(call._replace(a=call.b.t(), b=call.a), twin)


def test_a_missing_global_scale():
    right = planes_of("fprop", "nvfp4")
    call, twin = scaled_call(*right, torch.float32), Twin((10, 0))
    without = call._replace(scale_a=[call.scale_a[0], torch.ones(1)])
    assert ((as_called(without, twin).double() - as_called(call, twin)).abs() > bound(*right)).any()


def test_codes_in_the_other_nibbles():
    right = planes_of("fprop", "nvfp4")
    call, twin = scaled_call(*right, torch.float32), Twin((10, 0))
    codes = call.a.view(torch.uint8)
    swapped = ((codes >> 4) | (codes << 4)).view(call.a.dtype)
    assert ((as_called(call._replace(a=swapped), twin).double() - as_called(call, twin)).abs() > bound(*right)).any()


WRONG = {
    "one swizzle for two scales": ("nvfp4", {"swizzle_a": [SwizzleType.SWIZZLE_32_4_4]}, "needs 2 swizzles"),
    "no swizzle": ("mxfp8", {"swizzle_b": []}, "needs 1 swizzles"),
    "a swizzle that is not said": ("mxfp8", {"swizzle_a": [SwizzleType.NO_SWIZZLE]}, "must be swizzled"),
    "another recipe": ("mxfp8", {"recipe_a": [ScalingType.BlockWise1x16]}, "no kernel for"),
    "no padding": (
        "mxfp8",
        {"scale_a": [torch.zeros(96, 5, dtype=torch.uint8).view(torch.float8_e8m0fnu)]},
        "scales are",
    ),
    "a bias with fp32": ("mxfp8", {"bias": torch.zeros(224)}, "no bias with a float32 result"),
    "another bias": ("mxfp8", {"bias": torch.zeros(224), "output_dtype": torch.bfloat16}, "dtype of the result"),
}


@pytest.mark.parametrize("what", WRONG)
def test_calls_that_torch_would_refuse(what):
    family, change, message = WRONG[what]
    call = scaled_call(*planes_of("fprop", family), torch.float32)
    with pytest.raises(Refused, match=message):
        as_called(call._replace(**change), Twin((10, 0)))


def test_rows_must_be_contiguous_and_aligned():
    a, b = planes_of("fprop", "mxfp8")
    call, twin = scaled_call(a, b, torch.float32), Twin((10, 0))
    with pytest.raises(Refused, match="b must be column-major"):
        as_called(call._replace(b=call.b.contiguous()), twin)
    with pytest.raises(Refused, match="a must be row-major"):
        as_called(call._replace(a=call.a.view(torch.uint8).t().contiguous().t().view(call.a.dtype)), twin)
    memory = torch.empty(a.data.numel() + 1, dtype=torch.uint8)[1:].view(a.data.shape).copy_(a.data)
    with pytest.raises(Refused, match="multiple of 16 bytes"):
        as_called(call._replace(a=memory.view(call.a.dtype)), twin)
    assert torch.equal(as_called(scaled_call(replace(a, data=memory), b, torch.float32), twin), as_called(call, twin))


@pytest.mark.parametrize(
    ("family", "capability"), [("mxfp8", (9, 0)), ("nvfp4", (9, 0)), ("fp8_block", (10, 0)), ("fp8", (8, 0))]
)
def test_hardware_without_the_format(family, capability):
    call = scaled_call(*planes_of("fprop", family), torch.float32)
    with pytest.raises(Refused, match="capability"):
        as_called(call, Twin(capability))
    assert FAMILIES[family][1].capability != capability


def test_padding_of_scales_is_never_read():
    """It may be anything: the twin reads only what belongs to a block."""
    a, b = planes_of("fprop", "mxfp8")
    assert a.format == mxfp8_format()
    noise = torch.randint(100, 140, a.scale.shape, dtype=torch.uint8)
    noise[: a.operand_scales().shape[0], : a.operand_scales().shape[1]] = a.operand_scales()
    results = [as_called(scaled_call(each, b, torch.float32), Twin((10, 0))) for each in (a, replace(a, scale=noise))]
    assert torch.equal(*results)
