"""``crossgrain doctor`` says what this machine can do, and finds kernels that give wrong bytes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import crossgrain
from crossgrain.cli import doctor
from crossgrain.cli.checkup import backends, gpus, packages, processor, self_test, whole
from crossgrain.cli.checkup.findings import Checkup, Gpu, Processor, SelfTest
from crossgrain.cli.checkup.variables import KNOWN, set_variables
from crossgrain.gemm.native import Gpu as GemmGpu
from crossgrain.kernels import REFERENCE, choice
from crossgrain_command.app import app

from .self_test_archive import arrays

_SOURCE = Path(crossgrain.__file__).parent
_PROCESSOR = Processor("a CPU", 2, 1, ("AVX2",), ())


@pytest.fixture(scope="module")
def checkup() -> Checkup:
    """A checkup of this machine, without asking whether AMX runs, which starts a process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(processor, "amx_problem", lambda: None)
        return whole.check_up()


def printed(monkeypatch: pytest.MonkeyPatch, found: Checkup, *arguments: str) -> tuple[str, int]:
    monkeypatch.setattr(doctor, "check_up", lambda: found)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.stdout, result.exit_code


def changed(found: Checkup, **values: Any) -> Checkup:
    return Checkup(**{**vars(found), **values})


def test_the_text_fits_a_terminal_and_has_no_colours(checkup, monkeypatch):
    text, code = printed(monkeypatch, checkup)
    assert code == 0 and text.endswith("All is well.\n")
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text
    said = " ".join(text.split())
    for wanted in (
        f"torch {torch.__version__}",
        "reference on cpu: right in all 7 cases",
        "cpu: cpu",
        "GPU none: torch",
    ):
        assert wanted in said


def test_json_has_everything(checkup, monkeypatch):
    text, code = printed(monkeypatch, checkup, "--json")
    data = json.loads(text)
    assert code == 0 and data["problems"] == []
    assert data.keys() == {*vars(checkup), "problems"}
    assert [test["backend"] for test in data["self_tests"]] == ["reference", "cpu"]
    assert data["cache"]["files"] > 0 and data["cache"]["writable"]


def test_the_shipped_vectors_are_the_golden_ones():
    expected = arrays()
    with np.load(self_test.ARCHIVE) as shipped:
        assert set(shipped) == set(expected)
        for name, array in expected.items():
            assert array.dtype == shipped[name].dtype, name
            np.testing.assert_array_equal(shipped[name], array, err_msg=name)


def test_every_case_compares_both_planes_with_what_they_decode_to():
    names = set(arrays())
    for case in self_test.CASES:
        assert {f"{case}/{side}_data" for side in ("row", "col")} <= names
    assert sum(name.endswith("_dq") for name in names) >= len(self_test.CASES)


class _Wrong(type(REFERENCE)):  # type: ignore[misc]
    """The reference with one wrong bit in a buffer of each plane, or in what it decodes to."""

    name = "wrong"

    def __init__(self, buffer: str) -> None:
        self.buffer = buffer

    def encode(self, x, targets, seed):
        super().encode(x, targets, seed)
        buffer = getattr(targets[0].plane, self.buffer, None)
        if buffer is not None:
            buffer.view(-1)[:1].view(torch.uint8)[0] ^= 1

    def decode_operand(self, plane, workspace=None):
        decoded = super().decode_operand(plane, workspace).clone()
        if self.buffer == "decoded":
            decoded.view(-1)[0] += 1
        return decoded


@pytest.mark.parametrize("buffer, part", [("data", "data"), ("scale", "scale"), ("amax", "amax"), ("decoded", "dq")])
def test_one_wrong_bit_is_found(buffer, part):
    problems = self_test.run_self_test(_Wrong(buffer), "cpu", 60.0).problems
    for side in ("row", "col"):
        assert any(re.search(rf": 1 of \d+ numbers of {side}_{part} are wrong", problem) for problem in problems)


def test_a_wrong_bit_is_told_and_ends_with_1(checkup, monkeypatch):
    wrong = self_test.run_self_test(_Wrong("data"), "cpu", 60.0)
    found = changed(checkup, self_tests=(wrong,))
    text, code = printed(monkeypatch, found)
    assert code == 1 and "wrong on cpu: FAILED" in text
    assert "BROKEN      wrong kernels on cpu: mxfp8/special_infnan_e4m3: 1 of" in text
    assert printed(monkeypatch, found, "--json")[1] == 1


def test_kernels_that_raise_are_a_finding():
    class Raising(type(REFERENCE)):
        name = "raising"

        def encode(self, x, targets, seed):
            raise RuntimeError("no kernel image is available")

    test = self_test.run_self_test(Raising(), "cpu", 60.0)
    assert len(test.problems) == len(self_test.CASES)
    assert re.search(r"raised RuntimeError in test_doctor.py:\d+: no kernel image is available", test.problems[0])


def test_cases_that_do_not_fit_into_the_time_are_told():
    test = self_test.run_self_test(REFERENCE, "cpu", 0.0)
    assert (test.cases, test.of) == (1, len(self_test.CASES))
    assert "right in 1 of 7 cases; crossgrain warmup" in doctor._self_test(test)
    assert "right in all 7 cases" in doctor._self_test(SelfTest("cpu", "cpu", 7, 7, 1.0))


def test_a_broken_import_is_a_finding(checkup, monkeypatch):
    def broken() -> str:
        raise AttributeError("module 'numpy' has no attribute 'long'")

    monkeypatch.setattr(packages, "_import_numba", broken)
    found = packages.needed_packages()
    (numba,) = (each for each in found if each.name == "numba")
    assert numba.version is not None
    assert numba.problem == "importing it raised AttributeError: module 'numpy' has no attribute 'long'"
    text, code = printed(monkeypatch, changed(checkup, packages=found))
    assert code == 1 and "BROKEN      numba: importing it raised AttributeError" in text


def test_what_is_not_installed_is_not_broken(checkup, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(packages.metadata, "version", lambda name: _missing(name))
    found = packages.needed_packages()
    text, code = printed(monkeypatch, changed(checkup, packages=found, clients=packages.client_packages()))
    assert code == 0 and "triton (not installed)" in " ".join(text.split())
    assert "no other program was found" in text


def _missing(name: str) -> str:
    raise packages.metadata.PackageNotFoundError(name)


def test_kernels_that_cannot_be_loaded(monkeypatch):
    def broken() -> Any:
        raise OSError("libLLVM.so: cannot open shared object file")

    monkeypatch.setattr(choice, "_load_cpu_backend", broken)
    monkeypatch.setattr(choice, "_cpu", None)
    choice.serving.clear()
    loaded = backends.load("cpu")
    told = backends.described("cpu", loaded, "cpu", None)
    assert told.broken and told.name is None and "libLLVM.so" in (told.note or "")


def test_kernels_that_are_missing_are_not_broken(monkeypatch):
    """Without numba, as the library itself finds it."""
    monkeypatch.setattr(choice, "_cpu", None)
    monkeypatch.setitem(sys.modules, "numba.core", None)
    choice.serving.clear()
    try:
        told = backends.described("cpu", backends.load("cpu"), "cpu", None)
    finally:
        choice.serving.clear()
    assert (told.name, told.broken) == ("reference", False)
    assert "compiled CPU kernels are not available" in (told.note or "")


def test_kernels_that_are_switched_off():
    with choice.using_backend("reference"):
        told = backends.described("cpu", backends.load("cpu"), "cpu", None)
    assert told.name == "reference" and "switched off" in (told.note or "")


def test_a_cache_that_is_not_there(tmp_path, checkup, monkeypatch):
    assert backends.kernel_cache(None).directory is None
    assert not backends.kernel_cache(str(tmp_path / "nowhere")).writable
    found = changed(checkup, cache=backends.kernel_cache(str(tmp_path / "nowhere")))
    assert "set NUMBA_CACHE_DIR" in " ".join(printed(monkeypatch, found)[0].split())
    (tmp_path / "kernel.nbc").write_bytes(bytes(100))
    (tmp_path / "other").write_bytes(bytes(100))
    cache = backends.kernel_cache(str(tmp_path))
    assert (cache.files, cache.size_bytes, cache.writable) == (1, 100, True)


@pytest.mark.parametrize(
    "gpu, native",
    [
        (GemmGpu((8, 0)), set()),
        (GemmGpu((9, 0)), {"fp8", "fp8_block"}),
        (GemmGpu((10, 0)), {"fp8", "mxfp8", "nvfp4"}),
    ],
)
def test_gpus_tell_what_is_native(gpu, native):
    found = gpus.gemms_of(gpu)
    assert {name for name, way in found.items() if way == "native"} == native
    assert all(way.startswith("decoded to ") for name, way in found.items() if name not in native)


def test_a_gpu_asks_for_results(checkup, monkeypatch):
    gpu = Gpu("cuda:0", "GPU of the future", "compute capability 10.0", 192 << 30, gpus.gemms_of(GemmGpu((10, 0))))
    text, code = printed(monkeypatch, changed(checkup, gpus=(gpu,), no_gpu=None))
    said = " ".join(text.split())
    assert code == 0 and "cuda:0: GPU of the future, compute capability 10.0, 192 GiB fp8: native" in said
    assert "make test-gpu" in said and "docs/how-to/on-your-gpu.md" in said
    assert max(map(len, text.splitlines())) <= 80


def test_why_there_is_no_gpu(monkeypatch):
    assert "built without CUDA" in (gpus.why_no_gpu() or "")
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert gpus.why_no_gpu() == "torch was built for CUDA 12.9, and finds no GPU or no driver for it"


def test_the_features_of_a_cpu(tmp_path, monkeypatch):
    described = tmp_path / "cpuinfo"
    described.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 avx_vnni\n\nmodel name\t: Another\n")
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    found = processor.processor(described)
    assert (found.model, found.features) == ("Some CPU", ("AVX2", "VNNI"))
    assert found.missing == ("AVX-512", "AVX-512 bf16", "AMX")
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    assert processor.processor(tmp_path / "nothing").features == ("NEON",)


def test_amx_that_does_not_run_is_broken(checkup, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    ended = types.SimpleNamespace(returncode=-signal.SIGILL)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: ended)
    problem = processor.amx_problem()
    found = changed(checkup, processor=Processor("a CPU", 2, 1, ("AMX",), (), problem))
    text, code = printed(monkeypatch, found)
    assert code == 1 and "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in text
    ended.returncode = 0
    assert processor.amx_problem() is None


def test_amx_is_not_tried_where_torch_does_without(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("a process was started"))
    assert processor.amx_problem() is None


def test_variables_say_what_they_do():
    given = {
        "CROSSGRAIN_NUM_THREADS": "4",
        "CROSSGRAIN_THREADS": "4",
        "NVTE_NVFP4_DISABLE_RHT": "1",
        "NVTE_USE_FAST_MATH": "1",
        "NVTE_UNFUSED_ATTN": "1",
        "HOME": "/root",
    }
    effects = {variable.name: variable.effect for variable in set_variables(given)}
    assert effects.keys() == given.keys() - {"HOME"}
    assert effects["CROSSGRAIN_THREADS"] == "no effect: crossgrain reads no variable of this name"
    assert effects["NVTE_USE_FAST_MATH"].startswith("no effect here: ")
    assert not effects["NVTE_NVFP4_DISABLE_RHT"].startswith("no effect")
    assert not effects["NVTE_UNFUSED_ATTN"].startswith("no effect"), "this value asks for what happens anyway"


def test_every_variable_of_the_library_is_known():
    read = {name for path in _SOURCE.rglob("*.py") for name in re.findall(r"CROSSGRAIN_[A-Z_]*[A-Z]", path.read_text())}
    assert read == {name for name in KNOWN if name.startswith("CROSSGRAIN_")}
