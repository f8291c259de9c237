"""GEMMs of tensors without numbers: torch's own shape functions take every call, and the host reads nothing.

GEMMs are run on the device "meta", where an operation that would read a number raises. A build of torch for CPUs cannot
slice or copy fake "cuda" tensors, but it can call ``scaled_mm`` with them: with the shapes, strides and dtypes of the
arguments that were made on "meta".
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import crossgrain as cg
from crossgrain import kernels
from crossgrain.formats import BUILT_IN, Format, get_format, nvfp4_format
from crossgrain.gemm import gemm
from crossgrain.gemm.native import Gpu, machine, scaled_call
from crossgrain.gemm.native.arguments import lies_as_read
from crossgrain.gemm.native.scaled_call import ScaledCall, run
from crossgrain.gemm.operands import GEMMS
from crossgrain.kernels.choice import using_backend
from crossgrain.planes import COLUMNWISE, Plane, empty_plane
from crossgrain.quantizers.writing import plane_spec

from ...common.quantizers import QUANTIZERS
from .operands import B200, FAMILIES, H100, shapes_of, sizes_of

CUDA, META = torch.device("cuda", 0), torch.device("meta")


@pytest.fixture(autouse=True)
def _reference():
    with using_backend("reference"):
        yield


@pytest.fixture
def fake():
    with FakeTensorMode():
        yield


def empty_planes(
    which: str, formats: dict[str, Format], sizes: tuple[int, int, int], device: torch.device
) -> tuple[Plane, Plane]:
    shapes = shapes_of(*sizes)
    a, b = (
        empty_plane(formats[tensor], direction, shapes[tensor], device=device, dtype=torch.bfloat16)
        for tensor, direction in GEMMS[which].items()
    )
    return a, b


def formats_of(which: str, family: str) -> dict[str, Format]:
    names = dict(zip(("input", "weight", "grad_output"), FAMILIES[family][0], strict=True))
    return {tensor: QUANTIZERS[names[tensor]]().encoding(GEMMS[which][tensor]).format for tensor in GEMMS[which]}


def checked(result: torch.Tensor, planes: tuple[Plane, Plane], dtype: torch.dtype) -> None:
    assert result.device == planes[0].data.device and result.dtype == dtype
    assert tuple(result.shape) == (planes[0].operand_shape[0], planes[1].operand_shape[0])


def on_fake_cuda(value):
    """Fake "cuda" tensors like those of an argument, in the same places in memory."""
    if isinstance(value, list):
        return [on_fake_cuda(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)


@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_takes_the_arguments_of_every_native_gemm(family, which):
    planes = empty_planes(which, formats_of(which, family), sizes_of(family, which), META)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bias = None if dtype == torch.float32 else torch.zeros(planes[1].operand_shape[0], dtype=dtype, device=META)
        call = scaled_call(*planes, dtype, bias)
        checked(run(call), planes, dtype)
        with FakeTensorMode():
            result = run(ScaledCall(*map(on_fake_cuda, call)))
        assert isinstance(result, FakeTensor) and result.device == CUDA
        assert (result.shape, result.dtype) == (run(call).shape, dtype)


def test_torch_refuses_what_we_do_not_send():
    """Its shape function is alive: without the transposition or the swizzling it raises."""
    call = scaled_call(*empty_planes("fprop", formats_of("fprop", "mxfp8"), (96, 160, 224), META), torch.bfloat16)
    with pytest.raises(RuntimeError, match="mat2 must be col_major"):
        run(call._replace(b=call.b.contiguous()))
    with pytest.raises(RuntimeError, match="for MX scaling scale_a must have"):
        run(call._replace(scale_a=[call.scale_a[0][:96]]))
    with pytest.raises(RuntimeError, match="Must have swizzle type"):
        run(call._replace(swizzle_a=[]))


@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_option_of_a_native_gemm_makes_the_host_wait(family, which):
    planes = empty_planes(which, formats_of(which, family), sizes_of(family, which), META)
    calls = []

    def noting(call):
        calls.append(call)
        return run(call)

    with machine.replaced(FAMILIES[family][1], noting), cg.settings.override(native_gemms=True):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            result = gemm(which, *planes, out_dtype=dtype)
            bias = torch.zeros(planes[1].operand_shape[0], dtype=dtype, device=META)
            for each in (
                result,
                gemm(which, *planes, out_dtype=dtype, bias=bias, alpha=0.5),
                gemm(which, *planes, out=torch.zeros_like(result), accumulate=True, beta=0.5),
            ):
                checked(each, planes, dtype)
    assert len(calls) == 9


@pytest.mark.parametrize("gpu", [Gpu((8, 0)), H100, B200], ids=str)
@pytest.mark.parametrize("fmt", BUILT_IN, ids=lambda fmt: fmt.name)
def test_no_format_makes_the_host_wait_on_any_gpu(fmt, gpu):
    for which in GEMMS:
        planes = empty_planes(which, dict.fromkeys(GEMMS[which], fmt), (64, 128, 192), META)
        with machine.replaced(gpu):
            out = torch.zeros(planes[0].operand_shape[0], planes[1].operand_shape[0], device=META)
            checked(gemm(which, *planes, out=out, accumulate=True, alpha=0.5), planes, torch.float32)
            checked(gemm(which, *planes, out_dtype=torch.bfloat16), planes, torch.bfloat16)


def test_a_read_on_the_way_would_be_noticed(monkeypatch):
    planes = empty_planes("fprop", formats_of("fprop", "mxfp8"), (64, 128, 192), META)
    real = kernels.epilogue

    def reading(product, *rest):
        assert product.any() or True
        real(product, *rest)

    monkeypatch.setattr(kernels, "epilogue", reading)
    with machine.replaced(H100), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        gemm("fprop", *planes, alpha=0.5)


def test_operands_that_must_be_unrotated_and_plain_tensors():
    a, b = empty_planes(
        "wgrad", {"grad_output": nvfp4_format(rotation=0xD7E8), "input": nvfp4_format()}, (64, 128, 192), META
    )
    with machine.replaced(B200):
        checked(gemm("wgrad", a, b, allow_mixed=True), (a, b), torch.float32)
        x, w = torch.zeros(8, 16, device=META), torch.zeros(4, 16, device=META)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            result = gemm("fprop", x.to(dtype), w.to(dtype), out_dtype=dtype)
            assert result.shape == (8, 4) and result.dtype == dtype


def test_a_bf16_gemm_with_a_bf16_result_is_used_only_if_it_rounds_once(monkeypatch):
    seen = []
    real = torch.mm

    def noting(a, b, **options):
        seen.append((options.get("out_dtype"), options["out"].dtype))
        return real(a, b, **options)

    monkeypatch.setattr(torch, "mm", noting)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        for name, allowed in (("mxfp8", True), ("mxfp8", False), ("nvfp4", False)):
            matmul.allow_bf16_reduced_precision_reduction = allowed
            planes = empty_planes("fprop", dict.fromkeys(("input", "weight"), get_format(name)), (64, 128, 192), META)
            with machine.replaced(Gpu((8, 0))):
                gemm("fprop", *planes, out_dtype=torch.bfloat16)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
    by_epilogue = (torch.float32, torch.float32)  # NVFP4 has a scale that comes after the sums
    assert seen == [by_epilogue, (None, torch.bfloat16), by_epilogue]


# ---- columns of MXFP8 ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("capability", "native", "turned"),
    [((10, 0), None, True), ((12, 0), True, True), ((10, 0), False, False), ((9, 0), None, False)],
)
def test_columns_are_stored_as_the_gpu_reads_them_where_it_multiplies_them(capability, native, turned):
    """Of planes of tensors, and of planes that quantizers make for layers."""
    with cg.settings.override(compute_capability=capability, native_gemms=native):
        encoding = QUANTIZERS["mxfp8"]().encoding(COLUMNWISE)
        made = [
            empty_plane(encoding.format, COLUMNWISE, (4, 16, 96), device=CUDA),
            plane_spec(encoding, COLUMNWISE, False, (64, 96)).empty(CUDA),
        ]
    for plane in made:
        assert plane.data.shape in ((4, 16, 96), (64, 96))
        assert plane.has_whole_rows == turned
        assert plane.operand_codes().stride() == ((64, 1) if turned else (1, 96))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("capability", [(10, 0), (9, 0)])
def test_such_columns_are_not_copied_for_a_native_gemm(capability):
    with cg.settings.override(compute_capability=capability):
        a, b = empty_planes("wgrad", formats_of("wgrad", "mxfp8"), (96, 160, 224), CUDA)
    assert [lies_as_read(plane.operand_codes()) for plane in (a, b)] == [capability == (10, 0)] * 2


@pytest.mark.usefixtures("fake")
def test_planes_of_every_format_have_the_same_shapes_on_every_device():
    for fmt in BUILT_IN:
        if not fmt.is_identity:
            on_gpu = empty_plane(fmt, COLUMNWISE, (128, 256), device=CUDA)
            on_cpu = empty_plane(fmt, COLUMNWISE, (128, 256), device=torch.device("cpu"))
            assert [b.shape for b in on_gpu.buffers()] == [b.shape for b in on_cpu.buffers()]
