"""What the terminal tells about compiling: what took how long, and nothing where nobody would read it."""

import io
import os
import pty
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

import crossgrain as cg
from crossgrain.kernels.cpu import announcing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(announcing.time, "perf_counter", lambda: now.seconds)
    monkeypatch.setattr(announcing, "_untold", [])
    monkeypatch.setattr(announcing, "_seconds", 0.0)
    monkeypatch.setattr(announcing, "_lines", 0)
    return now


@pytest.fixture
def compile_one(clock):
    """Compile a kernel of some name, which takes some seconds, or find it on disk."""

    def run(name: str, seconds: float, from_disk: bool = False) -> None:
        stats = SimpleNamespace(cache_hits=Counter())
        kernel = SimpleNamespace(stats=stats, __name__=name, py_func=SimpleNamespace(__module__="crossgrain.x.rows"))
        with announcing.announced(kernel):
            clock.seconds += seconds
            if from_disk:
                stats.cache_hits[name] += 1

    return run


def told(monkeypatch, stream, compile_one) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    compile_one("cast", 0.4)
    compile_one("load", 5.0, from_disk=True)
    assert not stream.getvalue()
    compile_one("run", 0.7)
    compile_one("run", 1.5)
    compile_one("tiles", 0.6)
    return stream.getvalue()


def test_what_was_compiled_and_how_long_it_took(monkeypatch, compile_one):
    first, second = told(monkeypatch, Terminal(), compile_one).splitlines()
    assert first.startswith("crossgrain: compiled 2 kernels in 1.1 s (rows.cast, rows.run).") and "on disk" in first
    assert second == "crossgrain: compiled 2 kernels in 2.1 s (rows.run, rows.tiles)."


def test_nothing_is_written_to_a_log(monkeypatch, compile_one):
    assert told(monkeypatch, io.StringIO(), compile_one) == ""


def test_the_setting_switches_it_off(monkeypatch, compile_one):
    with cg.settings.override(announce_compiling=False):
        assert told(monkeypatch, Terminal(), compile_one) == ""


def test_a_real_terminal(tmp_path):
    code = (
        "import torch, crossgrain as cg; from crossgrain.kernels.cpu import announcing; announcing._LONG = 0.0;"
        "cg.quantizer_for('fp8')(torch.randn(64, 64))"
    )
    terminal, process_end = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        stderr=process_end,
        check=True,
    )
    os.close(process_end)
    assert b"crossgrain: compiled " in os.read(terminal, 10_000)
    os.close(terminal)
