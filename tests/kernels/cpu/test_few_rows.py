"""Products of a few rows with planes that are not decoded first."""

import sys

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.gemm import gemm
from crossgrain.kernels.cpu.backend import CpuBackend
from crossgrain.planes import empty_plane

from ...common.quantizers import QUANTIZERS

CPU = CpuBackend()
NAMES = ["mxfp8", "mxfp8_e5m2", "mxfp4", "mxfp6_e3m2", "nvfp4", "nvfp4_row_scaled", "fp8", "fp8_block", "fp8_block_2d"]


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def exact(left, right, rows, outputs):
    """The product of decoded numbers in float64, and a bound of the error of fp32 sums of so many numbers."""
    a, b = (kernels.decode_operand(plane).double() for plane in (left, right))
    return a @ b.t(), 2.0**-24 * a.shape[1] * (a.abs() @ b.abs().t())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_decoded_numbers(name, rows, threads, monkeypatch):
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", str(threads))
    monkeypatch.setattr("crossgrain.kernels.cpu.runtime.ELEMENTS_PER_THREAD", 1 << 12 if threads > 1 else 1 << 18)
    monkeypatch.setattr(sys.modules["crossgrain.gemm.product"], "_LEAST_NUMBERS", 0)
    used, multiply = [], kernels.multiply_few
    monkeypatch.setattr(kernels, "multiply_few", lambda *args: used.append(multiply(*args)) or used[-1])
    for outputs, inner in ((96, 160), (40, 1056)):
        outputs = 48 if name.startswith("nvfp4") and outputs == 40 else outputs
        quantizer = QUANTIZERS[name]()
        left, right = (
            quantizer.make_planes(numbers(size, inner) * scale, rowwise=True, columnwise=False).plane(ROWWISE)
            for size, scale in ((rows, 1.0), (outputs, 3.0))
        )
        wanted, bound = exact(left, right, rows, outputs)
        assert ((gemm("fprop", left, right).double() - wanted).abs() <= bound).all()
        bias = numbers(outputs)
        found = gemm("fprop", left, right, bias=bias, alpha=2.0)
        assert ((found.double() - (2 * wanted + bias)).abs() <= 2 * bound + 2.0**-23 * found.abs()).all()
        before = numbers(rows, outputs)
        out = gemm("fprop", left, right, out=before.clone(), accumulate=True)
        assert ((out.double() - (wanted + before)).abs() <= bound + 2.0**-23 * out.abs()).all()
    assert used and all(used)


def test_more_rows_are_decoded(monkeypatch):
    monkeypatch.setattr(kernels, "multiply_few", lambda *_: pytest.fail("a kernel for few rows was asked"))
    quantizer = QUANTIZERS["mxfp8"]()
    left, right = (
        quantizer.make_planes(numbers(size, 64), rowwise=True, columnwise=False).plane(ROWWISE) for size in (9, 1024)
    )
    assert gemm("fprop", left, right).shape == (9, 1024)


def test_columns_that_are_not_stored_transposed_are_left_to_gemms_of_decoded_numbers():
    fmt = QUANTIZERS["mxfp8"]().encoding(COLUMNWISE).format
    plane = empty_plane(fmt, COLUMNWISE, (64, 32), device=torch.device("cpu"))
    assert not CPU.multiply_few(numbers(2, 64), plane, torch.empty(2, 32))


def test_a_layer_in_inference_computes_what_it_computes_with_more_rows(monkeypatch):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(256, 512), numbers(16, 256)
    cg.convert(layer, "mxfp8")
    used, multiply = [], kernels.multiply_few
    monkeypatch.setattr(kernels, "multiply_few", lambda *args: used.append(multiply(*args)) or used[-1])
    with torch.no_grad():
        whole, one = layer(x), torch.cat([layer(row) for row in x.split(1)])
    torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)  # fp32 sums in another order
    assert used == [True] * 16


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_result_that_is_given_is_written_by_torch_which_checks_it(name, monkeypatch):
    """Kernels write to addresses: to nothing on meta, past autograd, and without the sign of a negated view."""
    monkeypatch.setattr(sys.modules["crossgrain.gemm.product"], "_LEAST_NUMBERS", 0)
    quantizer = QUANTIZERS[name]()
    left, right = (
        quantizer.make_planes(numbers(size, 64), rowwise=True, columnwise=False).plane(ROWWISE) for size in (4, 32)
    )
    wanted = gemm("fprop", left, right)
    out = torch.zeros(4, 32)
    version = out._version
    assert torch.equal(gemm("fprop", left, right, out=out), wanted) and out._version > version
    with torch.no_grad():
        negated = torch._neg_view(torch.zeros(4, 32))
        assert torch.equal(gemm("fprop", left, right, out=negated), wanted)
    for bad in (
        torch.zeros(4, 32, requires_grad=True),
        torch.zeros(32).expand(4, 32),
        torch.zeros(4, 32, device="meta"),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            gemm("fprop", left, right, out=bad)
