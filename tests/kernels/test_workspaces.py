"""Decoded operands in memory that is used again; planes whose buffers do not fit are refused."""

import threading

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.kernels import workspaces

from ..common.quantizers import E4M3


@pytest.fixture(autouse=True)
def _freed():
    yield
    kernels.free_workspaces()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_operands_are_decoded_into_the_workspace(backend, x):
    try:
        cg.set_backend(backend)
        for name in ("mxfp8", "nvfp4", "fp8_block", "fp8", "identity", "mxfp4"):
            q = cg.quantize(x, name)
            for direction in (ROWWISE, COLUMNWISE):
                plane = q.plane(direction)
                buffer = kernels.workspace("a", x.numel())
                operand = kernels.decode_operand(plane, buffer)
                assert torch.equal(operand, kernels.decode_operand(plane))
                assert operand.data_ptr() == buffer.data_ptr()
    finally:
        cg.set_backend("auto")


def test_buffers_are_kept_grow_and_are_freed():
    first = kernels.workspace("a", 100)
    assert kernels.workspace("a", 50) is first
    assert kernels.workspace("b", 50) is not first
    assert kernels.workspace("a", 200).numel() == 200
    kernels.free_workspaces()
    assert kernels.workspace("a", 10).numel() == 10


def test_threads_have_buffers_of_their_own():
    mine, theirs = kernels.workspace("a", 10), []
    thread = threading.Thread(target=lambda: theirs.append(kernels.workspace("a", 10)))
    thread.start()
    thread.join()
    assert theirs[0] is not mine


def test_the_limit_is_kept(monkeypatch):
    monkeypatch.setattr(workspaces, "LIMIT_BYTES", 400)
    assert kernels.workspace("a", 100) is not None
    assert kernels.workspace("a", 101) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rowwise_data": torch.zeros(64, 32, dtype=torch.uint8)}, "codes"),
        ({"rowwise_scale_inv": torch.zeros(64, 1, dtype=torch.uint8)}, "scales"),
        ({"rowwise_scale_inv": torch.zeros(128, 4)}, "scales"),
        ({"rowwise_scale_inv": None}, "scales"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(change, what):
    """Kernels read memory by address: a buffer that is too small must be noticed before."""
    q = cg.MXFP8Quantizer(E4M3)(torch.randn(64, 64))
    wrong = cg.MXFP8Tensor((64, 64), torch.float32, **{**q.get_metadata(), **change, "fake_dtype": None})
    with pytest.raises(ValueError, match=f"rowwise mxfp8 plane .* needs {what}"):
        wrong.dequantize()
    with pytest.raises(ValueError, match=f"needs {what}"):
        wrong.quantize_(torch.randn(64, 64))


def test_an_amax_that_does_not_fit_is_refused():
    q = cg.quantize(torch.randn(32, 32), "nvfp4_row_scaled")
    q._amax_rowwise = q._amax_rowwise[:3]
    with pytest.raises(ValueError, match="needs amax of torch.float32, 32 numbers"):
        q.dequantize()
