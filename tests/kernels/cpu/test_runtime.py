"""Compiling and running kernels under bad conditions: damaged caches, shutdown, forks."""

import _thread
import os
import pickle
import shutil
import subprocess
import sys
import threading
import weakref
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numba.core.config
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import crossgrain as cg
from crossgrain.formats import DEFAULT_SIGN_MASK, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE, Target
from crossgrain.kernels.cpu import compiling, measure, runtime, tags
from crossgrain.kernels.cpu.backend import CpuBackend
from crossgrain.planes import Direction, empty_plane

from ...common.copied_package import copied_package
from ...common.logs import logged, silent, warned
from ...common.quantizers import QUANTIZERS

SIGNATURE = (4096, 0, 8, tags.F32, tags.YES)  # what `measure.of_all` takes, by example


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- the cache on disk -------------------------------------------------------------------------------


@pytest.fixture
def amax_of(tmp_path, monkeypatch):
    """The amax kernel as a new process would find it, with its cache in ``tmp_path``."""
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))

    def compile_and_run(x: torch.Tensor) -> tuple[float, bool]:
        """The amax, and whether the machine code came from the disk."""
        dispatcher = compiling.kernel(measure.of_all.py_func)
        arguments = (x.data_ptr(), 0, x.numel(), *SIGNATURE[3:])
        bits = runtime.kernel(dispatcher, *arguments)(*arguments)
        value = torch.tensor([bits], dtype=torch.int32).view(torch.float32).item()
        return value, bool(dispatcher.stats.cache_hits)

    return compile_and_run


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def make_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\x80garbage" * 100),
    "another pickle": lambda path: path.write_bytes(pickle.dumps([1, 2, 3])),
    "truncated": truncate,
    "flipped bit": flip_a_bit,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_cache_is_replaced(kind, damage, amax_of, tmp_path):
    x = torch.tensor([1.0, -7.5, float("nan"), 3.0])
    assert amax_of(x) == (7.5, False)
    assert amax_of(x) == (7.5, True)
    (file,) = tmp_path.rglob(f"*.{kind}")
    DAMAGES[damage](file)
    with logged() as caught:
        assert amax_of(x) == (7.5, False)
    # An index of another version, or without our entry, is not damaged: it is just of no use.
    assert len(caught) == 1 or (kind == "nbi" and damage in ("another pickle", "flipped bit") and not caught)
    assert amax_of(x) == (7.5, True), "the next process finds a good cache again"


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_cache_that_can_be_neither_read_nor_replaced(kind, amax_of, tmp_path):
    x = torch.tensor([2.0, -4.0])
    amax_of(x)
    (file,) = tmp_path.rglob(f"*.{kind}")
    make_a_directory(file)
    with warned(r"compiled kernels.*cannot be used"):
        assert amax_of(x) == (4.0, False)
    with silent():
        assert amax_of(x) == (4.0, False), "one warning is enough"


USE_KERNELS = """
import io, sys, torch
sys.stderr = told = io.StringIO()
import crossgrain as cg
from crossgrain.kernels import REFERENCE
from crossgrain.kernels.cpu import rows
q = cg.quantize(torch.randn(64, 64), "mxfp8", columnwise=False)
assert cg.get_backend() == "cpu"
assert torch.equal(q.dequantize(), REFERENCE.decode(q.plane(cg.ROWWISE), torch.float32))
print(told.getvalue().count("compiled kernels"), rows.encode_rows.stats.cache_path)
"""


@pytest.fixture
def read_only_package(tmp_path):
    """A copy of the package beside whose sources nothing can be written, not even by root."""
    copy = copied_package(tmp_path / "site")
    shutil.rmtree(copy / "kernels" / "cpu" / "__pycache__", ignore_errors=True)
    (copy / "kernels" / "cpu" / "__pycache__").touch()
    (copy / "kernels" / "cpu").chmod(0o555)
    yield copy.parent
    (copy / "kernels" / "cpu").chmod(0o755)


def test_an_installation_that_is_read_only_uses_the_cache_of_the_user(read_only_package, tmp_path):
    home = tmp_path / "cache"
    environment = {"PYTHONPATH": str(read_only_package), "XDG_CACHE_HOME": str(home), "NUMBA_CACHE_DIR": ""}
    warned, path = run_python(USE_KERNELS, **environment).split()
    assert warned == "0" and Path(path).is_relative_to(home)
    assert list(home.rglob("*.nbc"))


def test_without_any_place_for_a_cache(read_only_package, tmp_path):
    nowhere = tmp_path / "file"
    nowhere.touch()
    environment = {"PYTHONPATH": str(read_only_package), "XDG_CACHE_HOME": str(nowhere), "NUMBA_CACHE_DIR": ""}
    assert run_python(USE_KERNELS, **environment).split() == ["1", "None"]


def test_the_digest_of_the_sources_is_that_of_the_import(tmp_path):
    """A source that is edited later is not what runs, so its digest must not be on what runs."""
    copy = copied_package(tmp_path)
    code = f"""
from crossgrain.kernels.cpu import backend, tags
before = open({str(copy / "kernels/cpu/simd.py")!r}, "a").write("# edited")
print(tags.TagType("x").name)
"""
    running, edited = (run_python(code, PYTHONPATH=str(tmp_path)) for _ in range(2))
    expected = tags.TagType("x").name
    assert running.strip() == expected and edited.strip() != expected


# ---- threads -----------------------------------------------------------------------------------------


def test_without_helpers_the_caller_does_all_ranges(monkeypatch):
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "4")
    monkeypatch.setattr(runtime, "_helpers", lambda wanted: 0)
    assert runtime.run_ranges(lambda first, last: (first, last), 10, 1 << 30) == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_where_no_thread_can_be_started_there_are_no_helpers(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(runtime, "_started", [])
    monkeypatch.setattr(runtime._thread, "start_new_thread", refuse)
    assert runtime._helpers(3) == 0


def test_a_thread_that_waits_for_work_owns_nothing(monkeypatch):
    """What a caller has let go is freed, although the thread that worked on it lives on."""
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "2")
    monkeypatch.setattr(runtime, "_jobs", SimpleQueue())
    monkeypatch.setattr(runtime, "_started", [])
    both = threading.Barrier(2)  # so that the helper takes a range too

    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)
    runtime.run_ranges(lambda first, last, keep=memory: both.wait(), 2, 1 << 30)
    del memory
    idle = threading.Event()
    runtime._jobs.put(idle.set)  # which the only helper begins when it has let go of the job before
    assert idle.wait(60)
    assert gone() is None
    runtime._jobs.put(_thread.exit)


def test_an_error_of_a_helper_reaches_the_caller(monkeypatch):
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "4")

    def work(first, last):
        if first == 5:
            raise ZeroDivisionError
        return first

    with pytest.raises(ZeroDivisionError):
        runtime.run_ranges(work, 10, 1 << 30)


@pytest.mark.parametrize("where", ["atexit", "thread"])
def test_quantizing_while_the_interpreter_shuts_down(where):
    at_exit = "atexit.register(work)"
    in_thread = "threading.Thread(target=lambda: (threading.main_thread().join(), work())).start()"
    code = f"""
import atexit, threading, torch, crossgrain as cg
x = torch.randn(1024, 1024)
expected = cg.quantize(x, "mxfp8", columnwise=False)._rowwise_data
def work():
    print(torch.equal(cg.quantize(x, "mxfp8", columnwise=False)._rowwise_data, expected))
{at_exit if where == "atexit" else in_thread}
"""
    assert run_python(code, CROSSGRAIN_NUM_THREADS="3").split() == ["True"]


_HELPER_AT_WORK = """
import atexit, sys, threading
ended, local, ready = [], threading.local(), threading.Event()
atexit.register(lambda: print(ended))  # registered first, so it is called last
import torch, crossgrain as cg
from crossgrain.kernels.cpu import runtime

class Owned:
    def __del__(self):
        ended.append("freed")

def work():
    local.tensor, local.owned = torch.ones(1 << 24), Owned()
    ready.wait()
    ended.append(float(sum(torch.ones(1 << 22).sum() for _ in range(20))))

cg.quantize(torch.randn(2048, 1024), "mxfp8", columnwise=False)
assert len(runtime._started) == 1
runtime._jobs.put(work)
atexit.register(ready.set)
"""


def test_the_end_of_a_program_waits_for_what_helpers_do():
    """The interpreter would end them wherever they are, and abort the process if that is in C++ code."""
    assert run_python(_HELPER_AT_WORK, CROSSGRAIN_NUM_THREADS="2").strip() == f"[{20.0 * (1 << 22)}]"


def test_the_end_of_a_program_does_not_wait_for_helpers_that_start_meanwhile(monkeypatch):
    started, waits = [0, 0], []

    class Jobs:
        def put(self, job):
            started.append(0)  # as another thread would
            threading.Thread(target=job, daemon=True).start()

    class Waiting(SimpleQueue):
        def get(self, timeout):
            waits.append(timeout)
            return super().get(timeout=timeout)

    for name, value in {"_started": started, "_jobs": Jobs(), "_at_exit": threading.Event()}.items():
        monkeypatch.setattr(runtime, name, value)
    monkeypatch.setattr(runtime, "SimpleQueue", Waiting)
    monkeypatch.setattr(runtime, "_LONGEST_WAIT", 30.0)
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=count(0.0, 5.0).__next__))
    runtime._park_helpers()
    assert waits == [25.0, 20.0]  # of 30 seconds for all


def test_ctrl_c_ends_the_wait_for_helpers_without_a_word(monkeypatch):
    class Interrupted(SimpleQueue):
        def get(self, timeout):
            raise KeyboardInterrupt

    for name, value in {"_started": [0], "_jobs": SimpleQueue(), "_at_exit": threading.Event()}.items():
        monkeypatch.setattr(runtime, name, value)
    monkeypatch.setattr(runtime, "SimpleQueue", Interrupted)
    runtime._park_helpers()
    assert runtime._at_exit.is_set()


def test_helpers_do_not_end_before_the_interpreter_shuts_down():
    """A thread that ends frees its tensors, in C++ code."""
    again = """
def look():
    for _ in range(100000):  # as long as the thread would need
        if "freed" in ended:
            break
        os.sched_yield()

import os
atexit.unregister(runtime._park_helpers)
atexit.register(look)
atexit.register(runtime._park_helpers)
atexit.register(ready.set)
"""
    assert "freed" not in run_python(_HELPER_AT_WORK + again, CROSSGRAIN_NUM_THREADS="2")


def test_a_fork_while_another_thread_compiles(tmp_path):
    """The child has the lock of the compiler, but not the thread that holds it."""
    code = """
import multiprocessing, threading, torch, crossgrain as cg
from numba.core.compiler_lock import global_compiler_lock

cg.kernels.amax(torch.randn(32, 32))
holding = threading.Event()

def compile_something():
    with global_compiler_lock:
        holding.set()
        cg.quantize(torch.randn(64, 64), "mxfp6_e3m2", columnwise=False)

thread = threading.Thread(target=compile_something)
thread.start()
holding.wait()
x = torch.randn(32, 32).bfloat16()  # for which there is another kernel

def compile_in_child():
    # The first new thread may get the identity of the one that holds the lock, and so the lock.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    cg.kernels.amax(x)

child = multiprocessing.get_context("fork").Process(target=compile_in_child)
child.start()
child.join(60)
print(child.exitcode)
child.kill()
thread.join()
"""
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)).split() == ["0"]


# ---- what numbers and tensors kernels are given ------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1e-45, 2.0, float("inf"), float("nan")])
def test_the_reciprocal_of_any_scale_is_silent(scale):
    from crossgrain.kernels.cpu.support import reciprocal

    with silent():
        mine = torch.tensor(reciprocal(scale))
    theirs = torch.tensor(1.0) / torch.tensor(scale)
    assert torch.equal(mine, theirs) or (mine.isnan() and theirs.isnan())


TWO_LEVEL = [
    Encoding(nvfp4_format()),
    Encoding(nvfp4_format(), stochastic=True),
    Encoding(nvfp4_format(two_d=True)),
    Encoding(nvfp4_format(row_scaled=True)),
    Encoding(nvfp4_format(rotation=DEFAULT_SIGN_MASK)),
]


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 1e-45, 3e38])
@pytest.mark.parametrize("encoding", TWO_LEVEL, ids=lambda e: e.format.name + "_sr" * e.stochastic)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
def test_an_amax_from_outside_may_be_anything(encoding, direction, amax):
    """For example reduced over ranks, one of which has overflowed."""
    x = torch.randn(64, 64)
    planes = []
    for backend in (CpuBackend(), REFERENCE):
        plane = empty_plane(encoding.format, direction, x.shape, device=x.device)
        given = torch.full_like(plane.amax, amax)
        given[1:] = 3.0  # where there is one for each row
        backend.encode(x, [Target(plane, encoding, amax=given)], 7)
        planes.append(plane)
    mine, theirs = planes
    assert torch.equal(mine.data, theirs.data)
    assert torch.equal(mine.scale, theirs.scale)
    assert torch.equal(mine.amax.view(torch.int32), theirs.amax.view(torch.int32))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_real_tensors_where_new_ones_are_fake(name):
    """Scratch and results have no memory under such a mode, so no kernel may run."""
    x = torch.randn(128, 128)
    q = QUANTIZERS[name]()(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for direction in Direction:
            assert q.dequantize(direction=direction).shape == x.shape
        for plane in q.planes():
            assert cg.kernels.decode_operand(plane).shape == x.shape
        q.quantize_(x)
        assert QUANTIZERS[name]()(x).dequantize().shape == x.shape
    assert q.dequantize().isfinite().all()
