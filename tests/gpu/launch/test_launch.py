"""`launch` and Triton's JIT, up to the driver: arguments, constants, grids, devices and streams."""

import contextlib

import pytest
import torch

from crossgrain.formats import DEFAULT_SIGN_MASK, mxfp8_format, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE, GlobalScale, Target
from crossgrain.kernels.triton import launch as launching
from crossgrain.kernels.triton.backend import TritonBackend
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane

from ..kernels.emulated import traits_of
from .driver import emulated_driver

TARGET = "sm_90"
ROTATED = Encoding(nvfp4_format(rotation=DEFAULT_SIGN_MASK), stochastic=True)


def hybrid(backend, x):
    """The bytes of an MXFP8 row and a rotated NVFP4 column."""
    planes = [
        Target(empty_plane(encoding.format, direction, x.shape, device=x.device), encoding)
        for encoding, direction in ((Encoding(mxfp8_format()), ROWWISE), (ROTATED, COLUMNWISE))
    ]
    targets = [each.with_amax(amax) for each, amax in zip(planes, backend.measure(x, planes), strict=True)]
    backend.encode(x, targets, seed=-5)
    return [buffer for each in targets for buffer in each.plane.buffers()]


def test_a_call_of_the_backend_reaches_the_driver():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    backend = TritonBackend(traits=traits_of(TARGET))
    with emulated_driver(TARGET) as gpu:
        found = hybrid(backend, x)
        again = hybrid(backend, x)
        out = torch.zeros(64, 96, dtype=torch.bfloat16)
        backend.epilogue(x.float(), out, GlobalScale(torch.full((1,), 3.0), 0.5), None, 1.0, None, None)
    for one, two, wanted in zip(found, again, hybrid(REFERENCE, x), strict=True):
        assert torch.equal(one, wanted) and torch.equal(two, wanted)
    assert torch.equal(out, (x.float() * 1.5).to(torch.bfloat16))
    assert [name for name, _, _ in gpu.launches] == ["amax_kernel", "encode_kernel"] * 2 + ["epilogue_kernel"]
    assert {stream for _, _, stream in gpu.launches} == {gpu.stream}


def test_a_kernel_runs_on_the_device_of_its_tensors(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(wanted):
        entered.append(wanted)
        yield

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: entered.append((grid, arguments))

    monkeypatch.setattr(torch.cuda, "device", device)
    launching.launch(Kernel(), 5, torch.device("cuda", 1), 4, {"x": 1})
    assert entered == [torch.device("cuda", 1), ((5,), {"x": 1, "num_warps": 4, "enable_fp_fusion": False})]


def test_tensors_on_another_device_are_refused():
    with pytest.raises(ValueError, match="a kernel runs on cuda:1, but amax is on cpu: move it there"):
        launching.launch(None, 1, torch.device("cuda", 1), 4, {"amax": torch.ones(1)})


def test_interpreted_kernels_are_refused_on_a_gpu():
    class InterpretedFunction:
        pass

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        launching.launch(InterpretedFunction(), 1, torch.device("cuda", 0), 4, {})


@pytest.mark.parametrize("value", [2**31 - 1, 2**40])
def test_sizes_beyond_32_bits_reach_the_kernel(value):
    """A stride that does not fit into 32 bits is compiled as a 64-bit argument."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    far = torch.as_strided(x, (1, 32), (value, 1))
    backend = TritonBackend(traits=traits_of(TARGET))
    with emulated_driver(TARGET):
        assert backend.amax(far).item() == x[0].abs().max().item()
