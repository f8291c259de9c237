"""What numba compiles for decides which kernels there are: this CPU, or the one that is configured."""

import platform

import pytest
from llvmlite import binding
from numba.core import config

from crossgrain.kernels.cpu.features import compiled_for

on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these are CPUs of x86")


def configure(monkeypatch, name, features):
    monkeypatch.setattr(config, "CPU_NAME", name, raising=False)
    monkeypatch.setattr(config, "CPU_FEATURES", features, raising=False)


@on_x86
@pytest.mark.parametrize("name, features, avx2, fma, avx512", [
    ("generic", None, False, False, False),
    ("generic", "+avx2", True, False, False),
    ("haswell", None, True, True, False),
    ("haswell", "-fma", True, False, False),
    ("haswell", "-avx2", False, True, False),
    ("icelake-server", "+avx512f,+avx512vnni", True, True, True),
    ("icelake-server", "", True, True, True),
    ("icelake-server", "+avx512f,+avx512vnni,-avx512f", True, True, False),
    ("icelake-server", "+avx512f,+avx512vnni,-avx2", False, True, False),
    ("generic", "+avx2,+fma,-avx2", False, True, False),
    ("skylake-avx512", "", True, True, False),
    ("a CPU that LLVM does not know", None, False, False, False),
])  # fmt: skip
def test_a_cpu_that_is_configured(name, features, avx2, fma, avx512, monkeypatch):
    configure(monkeypatch, name, features)
    assert (compiled_for("avx2"), compiled_for("fma"), compiled_for("avx2", "fma")) == (avx2, fma, avx2 and fma)
    assert compiled_for("avx512f", "avx512vnni") == avx512


def test_this_cpu(monkeypatch):
    configure(monkeypatch, None, None)
    found = binding.get_host_cpu_features()
    for feature in ("avx2", "fma", "avx512f", "nothing of the kind"):
        assert compiled_for(feature) == found.get(feature, False)


@on_x86
def test_features_without_a_name_belong_to_this_cpu(monkeypatch):
    configure(monkeypatch, None, "-avx2,-avx512f")
    assert not compiled_for("avx2") and not compiled_for("avx512f")


@on_x86
def test_numba_may_be_told_to_use_no_avx(monkeypatch):
    configure(monkeypatch, None, None)
    monkeypatch.setattr(config, "ENABLE_AVX", 0)
    assert not compiled_for("avx512f") and not compiled_for("avx512bw") and not compiled_for("avx512vnni")
