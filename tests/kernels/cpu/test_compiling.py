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
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("runs", [True, False])
def test_the_collector_waits_and_is_then_as_it_was(collector, runs):
    (gc.enable if runs else gc.disable)()
    with suppress(ZeroDivisionError), compiling.collector_waiting():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled() == runs


def test_kernels_are_compiled_while_the_collector_waits(collector):
    gc.enable()
    seen = []

    @intrinsic
    def look(typing_context, number):
        seen.append(gc.isenabled())
        return types.intp(types.intp), lambda context, builder, signature, args: args[0]

    @njit
    def looking(number, tag):
        return look(number)

    made = runtime.kernel(looking, 7, F32)
    del runtime._compiled[looking, F32.name]
    assert made(7, F32) == 7
    assert seen
    assert not any(seen)
    assert gc.isenabled()


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
