"""The compiled kernels give the bytes of the reference: every format, direction and awkward input."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.formats import E4M3, Format, ScaleLayout, get_format, mxfp8_format, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE
from crossgrain.kernels.cpu import known
from crossgrain.kernels.cpu.backend import CpuBackend

from ...common.copied_package import copied_package
from ...common.encodings import DIRECTIONS, HYBRIDS, NAMES, encoded, encodings_of, pair_of, that_fit
from ...common.quantizers import QUANTIZERS

CPU = CpuBackend()


def assert_bits_equal(mine, theirs, what):
    if mine.dtype.is_floating_point:
        assert torch.equal(mine.isnan(), theirs.isnan()), f"{what}: NaNs in other places"
        mine, theirs = (torch.where(t.isnan(), 0.0, t) for t in (mine, theirs))
    mine, theirs = (t.flatten().clone().view(torch.uint8) for t in (mine, theirs))
    assert torch.equal(mine, theirs), what


def assert_backends_agree(x, encodings):
    encodings = that_fit(encodings, x.shape)
    if not encodings:
        return
    fast, slow = (encoded(backend, x, encodings) for backend in (CPU, REFERENCE))
    for mine, theirs in zip(fast, slow, strict=True):
        name = f"{mine.direction.value} {mine.format.name} of {x.dtype} {list(x.shape)}"
        assert_bits_equal(mine.data, theirs.data, f"codes, {name}")
        assert_bits_equal(mine.scale, theirs.scale, f"scales, {name}")
        if mine.amax is not None:
            assert_bits_equal(mine.amax, theirs.amax, f"amax, {name}")
        for dtype in (torch.float32, torch.bfloat16):
            assert_bits_equal(CPU.decode(theirs, dtype), REFERENCE.decode(theirs, dtype), f"decode, {name}")
        assert_bits_equal(CPU.decode_operand(theirs), REFERENCE.decode_operand(theirs), f"operand, {name}")


def awkward_inputs():
    """Random, outliers, NaN, Inf, both zeros, subnormals, huge, tiny, arbitrary bits; in two shapes."""
    generator = torch.Generator().manual_seed(5)
    for shape in ((128, 128), (64, 288)):
        normal = torch.randn(shape, generator=generator)
        spread = normal * torch.logspace(-35, 35, shape[-1])
        nans, infs, zeros = normal.clone(), normal.clone(), normal.clone()
        nans.view(-1)[::67] = float("nan")
        nans[16:32] = float("nan")
        infs.view(-1)[::531] = float("inf")
        infs[5, 7] = -float("inf")
        zeros[:, ::3] = 0.0
        zeros[:, 1::3] = -0.0
        patterns = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)
        yield from (normal, spread, nans, infs, zeros, normal * 1e-41, normal * 3e37, -torch.zeros(shape))
        yield patterns.view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_awkward_inputs(name, directions, dtype):
    for x in awkward_inputs():
        assert_backends_agree(x.to(dtype), encodings_of(name, DIRECTIONS[directions]))


@pytest.mark.parametrize("pair", HYBRIDS)
def test_pairs_of_formats(pair):
    for x in awkward_inputs():
        for dtype in (torch.float32, torch.bfloat16):
            assert_backends_agree(x.to(dtype), pair_of(pair))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
def test_stochastic_rows_of_bytes(name):
    for x in awkward_inputs():
        assert_backends_agree(x, [(ROWWISE, Encoding(get_format(name), stochastic=True))])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_plane_twice_is_written_twice(name):
    assert_backends_agree(torch.randn(128, 128), encodings_of(name, (ROWWISE, COLUMNWISE, ROWWISE, COLUMNWISE)))


SHAPES = [(1, 128), (32, 32), (16, 16), (128, 1), (160, 3), (96, 48), (130, 200), (33, 7), (3, 32, 64), (2, 2, 32, 96)]
SHAPES += [(256, 1040), (144, 1152), (0, 128), (128, 0), (5,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_odd_shapes(name, shape):
    """Tails, one row, one block, more dimensions; directions that do not fit the shape are left out."""
    x = torch.randn(shape)
    for dtype in (torch.float32, torch.bfloat16):
        for directions in DIRECTIONS.values():
            assert_backends_agree(x.to(dtype), encodings_of(name, directions))


@pytest.mark.parametrize("name", NAMES)
def test_non_contiguous_input(name):
    assert_backends_agree(torch.randn(256, 256).t(), encodings_of(name, (ROWWISE, COLUMNWISE)))


@pytest.mark.parametrize("name", [name for name in NAMES if name in QUANTIZERS])
def test_sliced_planes(name):
    q = QUANTIZERS[name]()(torch.randn(256, 256))
    for part in (q[128:], q[:, 128:]):
        for plane in part.planes():
            assert_bits_equal(CPU.decode(plane, torch.float32), REFERENCE.decode(plane, torch.float32), name)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_arbitrary_bit_patterns(data):
    name = data.draw(st.sampled_from(NAMES))
    words = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
    flat = np.resize(np.array(words, dtype=np.uint32), 128 * 128).view(np.float32)
    x = torch.from_numpy(np.random.default_rng(len(words)).permutation(flat)).view(128, 128)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    assert_backends_agree(x.to(dtype), encodings_of(name, (ROWWISE, COLUMNWISE)))


@pytest.mark.parametrize("name", NAMES)
def test_thread_counts_do_not_matter(name, monkeypatch):
    """Large enough to be shared, with ranges that do not divide evenly."""
    monkeypatch.setattr("crossgrain.kernels.cpu.runtime.ELEMENTS_PER_THREAD", 4096)
    x = torch.randn(384, 160) if "block" not in name else torch.randn(384, 256)
    planes = []
    for threads in ("1", "2", "3", "7"):
        monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", threads)
        planes.append(encoded(CPU, x, encodings_of(name, (ROWWISE, COLUMNWISE))))
        for plane in planes[-1]:
            assert_bits_equal(CPU.decode(plane, torch.float32), REFERENCE.decode(plane, torch.float32), name)
    for others in planes[1:]:
        for mine, theirs in zip(others, planes[0], strict=True):
            assert_bits_equal(mine.data, theirs.data, name)
            assert_bits_equal(mine.scale, theirs.scale, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4_rht", "fp8", "fp8_block", "mxfp6_e3m2"])
def test_large_results_are_streamed_alike(name, dtype):
    """Decoding past the caches (from a million elements on) changes nothing."""
    for plane in encoded(CPU, torch.randn(1024, 1056), encodings_of(name, (ROWWISE, COLUMNWISE))):
        assert_bits_equal(CPU.decode(plane, dtype), REFERENCE.decode(plane, dtype), name)


@pytest.mark.parametrize("name", sorted(fmt.name for fmt in known.FORMATS))
def test_every_format_that_kernels_know_has_kernels(name, monkeypatch):
    """Nothing of an ordinary matrix is left to the reference."""
    for work in ("encode.operand_of", "decode.decode_operand"):
        monkeypatch.setattr(f"crossgrain.kernels.reference.{work}", None)
    for plane in encoded(CPU, torch.randn(128, 128), encodings_of(name, (ROWWISE, COLUMNWISE))):
        CPU.decode_operand(plane)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert CPU.decode(plane, dtype).dtype == dtype


def test_many_threads_at_once():
    x = torch.randn(256, 256)
    encodings = encodings_of("mxfp8", (ROWWISE, COLUMNWISE)) + encodings_of("nvfp4", (ROWWISE,))
    expected = [plane.data for plane in encoded(REFERENCE, x, encodings)]
    wrong = []

    def work():
        for _ in range(20):
            planes = encoded(CPU, x, encodings)
            wrong.extend(p for p, data in zip(planes, expected, strict=True) if not torch.equal(p.data, data))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _encode_in_child(rank, x, expected, results):
    os.environ["CROSSGRAIN_NUM_THREADS"] = "2"
    planes = encoded(CPU, x, encodings_of("mxfp8", (ROWWISE, COLUMNWISE)))
    results[rank] = all(torch.equal(p.data, data) for p, data in zip(planes, expected, strict=True))


def test_threads_after_a_fork(monkeypatch):
    """The pool of the parent does not exist in the child: it must make its own."""
    monkeypatch.setattr("crossgrain.kernels.cpu.runtime.ELEMENTS_PER_THREAD", 4096)
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "2")
    x = torch.randn(256, 256)
    expected = [p.data for p in encoded(CPU, x, encodings_of("mxfp8", (ROWWISE, COLUMNWISE)))]
    with mp.get_context("fork").Manager() as manager:
        results = manager.dict()
        mp.start_processes(_encode_in_child, args=(x, expected, results), nprocs=2, start_method="fork")
        assert dict(results) == {0: True, 1: True}


# ---- choosing ----------------------------------------------------------------------------------------


def test_set_backend():
    x = torch.randn(64, 64)
    try:
        cg.set_backend("reference")
        assert cg.get_backend() == "reference"
        slow = cg.quantize(x, "mxfp8")
        cg.set_backend("cpu")
        assert cg.get_backend() == "cpu"
        assert torch.equal(cg.quantize(x, "mxfp8")._rowwise_data, slow._rowwise_data)
    finally:
        cg.set_backend("auto")
    assert cg.get_backend() == "cpu"
    assert cg.get_backend("meta") == "reference"
    with pytest.raises(ValueError, match="got 'fast'"):
        cg.set_backend("fast")


@pytest.mark.parametrize("reason", ["missing", "disabled"])
def test_without_numba_the_reference_serves_with_one_warning(reason):
    hide = "sys.modules['numba'] = None" if reason == "missing" else "os.environ['NUMBA_DISABLE_JIT'] = '1'"
    code = f"""
import os, sys
{hide}
import torch, crossgrain as cg
for _ in range(3):
    cg.quantize(torch.randn(32, 32), "mxfp8").dequantize()
assert cg.get_backend() == "reference"
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.count("the slow reference is used instead") == 1


def test_thread_count_follows_the_environment_and_torch(monkeypatch):
    from crossgrain.kernels.cpu.runtime import thread_count

    monkeypatch.delenv("CROSSGRAIN_NUM_THREADS", raising=False)
    assert thread_count(100) == 1
    assert thread_count(1 << 24) == torch.get_num_threads()
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "3")
    assert thread_count(1 << 24) == 3
    assert thread_count(64 * 64) == 1


def test_traced_tensors_go_to_the_reference():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        planes = encoded(CPU, torch.randn(32, 32), encodings_of("mxfp8", (ROWWISE, COLUMNWISE)))
        assert CPU.decode(planes[0], torch.float32).shape == (32, 32)
    assert kernels.get_backend("cpu") == "cpu"


def test_machine_code_of_other_sources_is_not_used(tmp_path):
    """numba's cache on disk looks at one file; a kernel depends on many."""
    copy = copied_package(tmp_path)
    code = """
import torch, crossgrain as cg
from crossgrain.kernels.cpu.backend import CpuBackend
cg.set_backend("reference")  # so that only the decoder is compiled
plane = cg.quantize(torch.full((32, 32), 3.0), "mxfp8").plane(cg.ROWWISE)
print(CpuBackend().decode(plane, torch.float32)[0, 0].item())
"""

    def run():
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        result = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
        )
        return float(result.stdout)

    assert run() == 3.0
    elements = copy / "kernels" / "cpu" / "elements.py"
    changed = elements.read_text().replace(
        "return float_of(max(byte << 23, 0x400000))", "return float_of((byte + 1) << 23)"
    )
    assert changed != elements.read_text()
    elements.write_text(changed)
    assert run() == 6.0, "the changed source must be what runs"


def test_tensors_without_memory_of_their_own_go_to_the_reference():
    """Transformed and lazy tensors have no address that a kernel could read."""
    x = torch.randn(2, 64, 64)
    assert torch.equal(torch.func.vmap(kernels.amax)(x), torch.stack([CPU.amax(x[0]), CPU.amax(x[1])]))
    decoded = cg.quantize(x[0], "mxfp8").dequantize()
    assert torch.equal(torch.func.functionalize(lambda v: cg.quantize(v, "mxfp8").dequantize())(x[0]), decoded)
    assert (cg.quantize(torch._efficientzerotensor((64, 64)), "nvfp4").dequantize() == 0).all()
    negative = torch.view_as_complex(torch.randn(32, 32, 2)).conj().imag
    assert negative.is_neg()
    assert torch.equal(
        cg.quantize(negative, "mxfp8")._rowwise_data, cg.quantize(negative.clone(), "mxfp8")._rowwise_data
    )


UNUSUAL = {
    "block-major scales": Format("u1", E4M3, (1, 32), "e8m0_up", ScaleLayout(transposed=True), transposes=False),
    "one scale per tile": Format("u2", E4M3, (32, 32), "e8m0_up", ScaleLayout(), transposes=False),
    "transposed": Format("u3", E4M3, (1, 32), "e8m0_up", ScaleLayout(pad=(128, 4))),
    "rotated": replace(mxfp8_format(), name="u4", rotation=3),
    "blocks in rows": Format("u5", E4M3, (1, 128), layout=ScaleLayout(), ragged=True),
    "two rows": Format("u6", E4M3, (2, 32), "e8m0_up", ScaleLayout(), transposes=False),
    "nvfp4 block-major": replace(nvfp4_format(), name="u7", layout=ScaleLayout(transposed=True)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_formats_that_only_resemble_the_built_in_ones(name):
    """Kernels know the layouts of the built-in formats; anything else must not reach them."""
    assert_backends_agree(torch.randn(128, 128), [(d, Encoding(UNUSUAL[name])) for d in (ROWWISE, COLUMNWISE)])


def test_memory_that_a_kernel_must_not_trust():
    plane = cg.quantize(torch.randn(64, 64), "mxfp8").plane(ROWWISE)
    for wrong in (torch.empty(4096, dtype=torch.bfloat16), torch.empty(100), torch.empty(8192)[::2]):
        with pytest.raises(ValueError, match="a workspace for a plane"):
            kernels.decode_operand(plane, wrong)
    scalar = cg.Float8Tensor(
        (4, 16), torch.float32, data=torch.ones(4, 16, dtype=torch.uint8), fp8_scale_inv=torch.tensor(0.5), fp8_dtype=7
    )
    assert torch.equal(scalar.dequantize(), REFERENCE.decode(scalar.plane(ROWWISE), torch.float32))
