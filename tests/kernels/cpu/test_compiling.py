"""How kernels are compiled: without steps that they do not need, while Python's garbage collector waits."""

import gc
import re
from contextlib import suppress

import pytest
from numba import njit, types
from numba.extending import intrinsic

from crossgrain.kernels.cpu import compiling, runtime
from crossgrain.kernels.cpu.tags import F32


@pytest.fixture
def collector():
    was, thresholds = gc.isenabled(), gc.get_threshold()
    yield
    (gc.enable if was else gc.disable)()
    gc.set_threshold(*thresholds)


def _collects():
    """Whether the collector runs when there are many new objects."""
    before = gc.get_stats()[0]["collections"]
    objects = [[] for _ in range(10_000)]
    return gc.get_stats()[0]["collections"] > before and bool(objects)


def test_the_collector_waits_and_is_then_as_it_was(collector):
    gc.enable()
    gc.set_threshold(300, 7, 8)
    with suppress(ZeroDivisionError), compiling.collector_waiting():
        assert not _collects()
        raise ZeroDivisionError
    assert gc.get_threshold() == (300, 7, 8)
    assert _collects()


def test_what_a_program_does_with_the_collector_meanwhile_stays(collector):
    gc.enable()
    with compiling.collector_waiting():
        gc.disable()
    assert not gc.isenabled()
    with compiling.collector_waiting():
        gc.set_threshold(123)
    assert gc.get_threshold()[0] == 123


def test_kernels_are_compiled_while_the_collector_waits(collector):
    gc.enable()
    seen = []

    @intrinsic
    def look(typing_context, number):
        seen.append(_collects())
        return types.intp(types.intp), lambda context, builder, signature, args: args[0]

    @njit
    def looking(number, tag):
        return look(number)

    made = runtime.kernel(looking, 7, F32)
    del runtime._compiled[looking, F32.name]
    assert made(7, F32) == 7
    assert seen
    assert not any(seen)
    assert _collects()


def _machine_code():
    """Of a kernel with a part, a loop and a branch."""

    @compiling.inner
    def doubled(number):
        return number * 2 if number > 3 else number

    @njit(nogil=True, error_model="numpy", pipeline_class=compiling._KernelCompiler)
    def summed(first, last, factor):
        total = 0.0
        for number in range(first, last):
            total += doubled(number) * factor
        return total

    summed.compile((types.intp, types.intp, types.float32))
    (assembly,) = summed.inspect_asm().values()
    # Names have numbers, and some numbers are addresses.
    return re.sub(r"[.\w$]*(summed|doubled|L)[.\w$]*|\d{9,}", "name", assembly)


def test_steps_that_are_left_out_change_no_machine_code(monkeypatch):
    trimmed = _machine_code()
    monkeypatch.setattr(compiling, "_NOT_NEEDED", set())
    monkeypatch.setattr(compiling, "_steps", {})
    assert _machine_code() == trimmed
    assert len(compiling._steps[compiling.NativeLowering][0].passes) > 20
