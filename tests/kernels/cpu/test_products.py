"""Products of planes from their codes, without decoding: exact sums of blocks, in any shape, on any thread."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from llvmlite import binding

import crossgrain as cg
from crossgrain import ROWWISE, kernels
from crossgrain.formats import E4M3, nvfp4_format
from crossgrain.gemm import gemm
from crossgrain.gemm.operands import GEMMS
from crossgrain.kernels.cpu import products
from crossgrain.planes import empty_plane

pytestmark = pytest.mark.skipif(
    not products.has_byte_dot_products(), reason="this CPU has no products of bytes (AVX-512 BW, AVX2)"
)

SHAPES = [(1, 1, 16), (8, 32, 16), (7, 31, 48), (9, 33, 80), (40, 100, 256), (1, 70, 32), (65, 3, 1024)]
CPU = torch.device("cpu")
EXPONENT_BIAS, MANTISSA_BITS = 7, 3


def plane_of(shape, direction=ROWWISE, scale_codes=None, seed=0):
    """Random codes of every kind, under the amax that means a global scale of one."""
    generator = torch.Generator().manual_seed(seed)
    fmt = nvfp4_format()
    plane = empty_plane(fmt, direction, shape, device=CPU)
    plane.data.copy_(torch.randint(0, 256, plane.data.shape, generator=generator))
    if scale_codes is None:  # powers of two from 1/8 to 8: every sum of products is exact in fp32
        exponents = torch.randint(-3, 4, plane.scale.shape, generator=generator) + EXPONENT_BIAS
        scale_codes = exponents << MANTISSA_BITS
    plane.scale.copy_(scale_codes)
    plane.amax.fill_(fmt.element.max * fmt.scale_bound)
    return plane


def operand(plane):
    return kernels.decode_operand(plane).double()


def product(a, b, factor=1.0):
    out = torch.full((a.operand_shape[0], b.operand_shape[0]), torch.nan)
    assert kernels.can_multiply(a, b)
    kernels.multiply(a, b, out, factor)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_where_all_sums_are_exact_so_is_the_product(shape):
    rows, columns, inner = shape
    a, b = plane_of((rows, inner), seed=1), plane_of((columns, inner), seed=2)
    assert torch.equal(product(a, b).double(), operand(a) @ operand(b).t())


def test_every_pair_of_codes():
    every = torch.arange(16, dtype=torch.uint8)
    codes = (every | every << 4).repeat_interleave(8).view(16, 8)  # a row of each code
    a, b = (plane_of((16, 16), scale_codes=torch.tensor(EXPONENT_BIAS << MANTISSA_BITS)) for _ in range(2))
    a.data.copy_(codes)
    b.data.copy_(codes)
    assert torch.equal(product(a, b).double(), operand(a) @ operand(b).t())


def test_every_block_scale_and_nan_in_both_operands():
    scales = torch.arange(128, dtype=torch.uint8).view(128, 1)  # 127 stands for NaN
    a, b = plane_of((128, 16), scale_codes=scales, seed=1), plane_of((128, 16), scale_codes=scales, seed=2)
    found, expected = product(a, b), operand(a) @ operand(b).t()
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan()[127].all() and found.isnan()[:, 127].all()
    assert torch.equal(found[:127, :127].double(), expected[:127, :127])


@pytest.mark.parametrize("inner", [64, 4096])
def test_the_rounding_of_a_sum_is_that_of_its_blocks(inner):
    torch.manual_seed(0)
    quantizer = cg.NVFP4Quantizer(columnwise=False)
    spread = torch.linspace(-8, 8, inner).exp2()  # or every sum would be exact
    planes = [quantizer(torch.randn(rows, inner) * spread).plane(ROWWISE) for rows in (24, 64)]
    a, b = (replace(plane, amax=torch.full_like(plane.amax, 6 * E4M3.max)) for plane in planes)
    error = (product(a, b).double() - operand(a) @ operand(b).t()).abs()
    # The product of two scales, each block's share and each addition round once.
    bound = (inner // 16 + 2) * torch.finfo(torch.float32).eps / 2 * (operand(a).abs() @ operand(b).abs().t())
    assert (error <= bound).all() and error.max() > 0


@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
def test_gemms_of_a_layer_agree_with_decoded_operands(which, rotated, monkeypatch):
    torch.manual_seed(0)
    x, w, dy = torch.randn(48, 64), torch.randn(80, 64), torch.randn(48, 80)
    quantizer = cg.NVFP4Quantizer(with_rht=rotated, with_post_rht_amax=rotated)
    tensors = {"input": x, "weight": w, "grad_output": dy}
    a, b = (quantizer(tensors[name]).plane(direction) for name, direction in GEMMS[which].items())
    rotated_alike = a.format.rotation == b.format.rotation
    assert kernels.can_multiply(a, b) == rotated_alike
    used = []
    multiply = kernels.multiply
    monkeypatch.setattr(kernels, "multiply", lambda *arguments: (used.append(which), multiply(*arguments)))
    found = gemm(which, a, b, allow_mixed=True)
    assert bool(used) == rotated_alike
    with cg.settings.override(gemm_operand_dtype=torch.float32):
        expected = gemm(which, a, b, allow_mixed=True)
    assert len(used) == rotated_alike  # a setting that names an operand's dtype has operands decoded
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # both round sums, in another order


OPTIONS = {
    "bias": {"bias": True},
    "added": {"accumulate": True, "beta": 0.5},
    "added, bias, alpha": {"accumulate": True, "bias": True, "alpha": 3.0},
    "bf16": {"out_dtype": torch.bfloat16},
    "transposed out": {"transposed": True},
    "columns apart": {"apart": True},
}


@pytest.mark.parametrize("rule", ["nvfp4", "nvfp4_row_scaled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_done_with_the_product(name, rule):
    """Numbers whose every sum is exact: decoded operands give the same bits."""
    options = dict(OPTIONS[name])
    torch.manual_seed(0)
    numbers = [torch.randint(-1, 2, (rows, 64)) * 6.0 * 448.0 for rows in (20, 40)]
    a, b = (cg.quantize(number, rule, columnwise=False).plane(ROWWISE) for number in numbers)
    bias = torch.arange(40.0) if options.pop("bias", False) else None

    def out():
        memory = torch.ones(20, 80)
        if options.get("transposed"):
            return torch.ones(40, 20).t()
        if options.get("apart"):
            return memory[:, :40]
        return torch.ones(20, 40) if options.get("accumulate") else None

    arguments = {key: value for key, value in options.items() if key not in ("transposed", "apart")}
    found = gemm("fprop", a, b, bias=bias, out=out(), **arguments)
    with cg.settings.override(gemm_operand_dtype=torch.float32):
        expected = gemm("fprop", a, b, bias=bias, out=out(), **arguments)
    assert torch.equal(found, expected)


def test_a_row_of_the_product_does_not_depend_on_the_others():
    """Unlike a BLAS, which takes other paths for other sizes."""
    torch.manual_seed(0)
    quantizer = cg.NVFP4Quantizer(columnwise=False)
    x, w = torch.randn(37, 512), torch.randn(100, 512)
    x[0] = 10.0 * x.abs().max()  # both batches have the amax of their first row
    b = quantizer(w).plane(ROWWISE)
    whole = gemm("fprop", quantizer(x).plane(ROWWISE), b)
    for rows in (1, 5, 8, 36):
        assert torch.equal(gemm("fprop", quantizer(x[:rows]).plane(ROWWISE), b), whole[:rows])


def test_any_number_of_threads(monkeypatch):
    a, b = plane_of((600, 2048), seed=1), plane_of((700, 2048), seed=2)
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "1")
    single = product(a, b)
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "3")
    assert torch.equal(product(a, b), single)


def test_others_are_decoded():
    nvfp4 = plane_of((32, 32))
    mxfp8 = cg.quantize(torch.randn(32, 32), "mxfp8").plane(ROWWISE)
    mxfp4 = cg.quantize(torch.randn(32, 32), "mxfp4").plane(ROWWISE)
    for other in (mxfp8, mxfp4, replace(nvfp4, format=nvfp4.format.with_rotation(5))):
        assert not kernels.can_multiply(nvfp4, other) and not kernels.can_multiply(other, nvfp4)
    assert not kernels.can_multiply(mxfp4, mxfp4)


def test_the_reference_decodes():
    planes = plane_of((32, 32)), plane_of((32, 32))
    cg.set_backend("reference")
    try:
        assert not kernels.can_multiply(*planes)
    finally:
        cg.set_backend("auto")


FORMS = {
    # With a name alone, numba adds the features of this CPU.
    "avx2": ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}, (False, False)),
    "avx512bw": (
        {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx512f,+avx512bw"},
        (True, False),
    ),
}
PRODUCTS = """
import sys, torch
from crossgrain.kernels.cpu import dot_tile
from tests.kernels.cpu.test_products import products_of_all_shapes
torch.save(((dot_tile.WIDE, dot_tile.FOUR_AT_ONCE), products_of_all_shapes()), sys.argv[1])
"""


def products_of_all_shapes():
    """With block scales of all kinds, so that sums round."""
    scales = (torch.arange(128, dtype=torch.uint8) * 37 % 127).view(128, 1)
    planes = [plane_of((128, 16), scale_codes=scales), plane_of((128, 16), scale_codes=scales.flip(0), seed=1)]
    found = [product(*planes, 0.3)]
    for rows, columns, inner in SHAPES:
        sides = (plane_of((size, inner), scale_codes=torch.tensor(0), seed=size) for size in (rows, columns))
        for side in (a_b := list(sides)):
            side.scale.copy_(torch.arange(side.scale.numel()).view(side.scale.shape) * 29 % 127)
        found.append(product(*a_b, 1.7))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bits(form, tmp_path):
    variables, expected_form = FORMS[form]
    if form not in binding.get_host_cpu_features() or not binding.get_host_cpu_features()[form]:
        pytest.skip(f"this CPU has no {form}")
    file = tmp_path / "products.pt"
    subprocess.run([sys.executable, "-c", PRODUCTS, file], env=os.environ | variables, check=True)
    used, products_there = torch.load(file)
    assert used == expected_form
    for there, here in zip(products_there, products_of_all_shapes(), strict=True):
        assert torch.equal(there, here)
