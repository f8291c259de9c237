"""Signals while kernels run on several threads: nobody writes to memory that the program has let go."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from crossgrain.kernels.cpu import decoders, runtime

from ...common.interrupts import interrupted_at


class Interrupted(Exception):
    pass


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "2")
    monkeypatch.setattr(runtime, "ELEMENTS_PER_THREAD", 1)


@pytest.fixture
def alarms():
    """Raises in the main thread, wherever it is, after so many seconds, and so often."""

    def raise_interrupted(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raise_interrupted)
    try:
        yield lambda first, again=0.0: signal.setitimer(signal.ITIMER_REAL, first, again)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("again", [0.0, 0.003], ids=["once", "again while it waits"])
def test_an_interrupt_waits_for_the_helpers_that_write(two_threads, alarms, again):
    """The helper goes on for a while after the main thread was interrupted; nothing may be freed before it is done."""
    main, log = threading.current_thread(), []
    helping = threading.Event()

    def work(first, last):
        if threading.current_thread() is main:
            helping.wait(10)
            alarms(0.005, again)
            while True:  # in a kernel, until the signal's handler raises
                time.sleep(0.001)
        log.append("begins")
        helping.set()
        time.sleep(0.1)
        log.append("ends")

    with pytest.raises(Interrupted):
        runtime.run_ranges(work, 2, 1 << 20)
    alarms(0)
    assert log == ["begins", "ends"]


def test_a_helper_that_has_not_begun_takes_nothing_after_an_error(two_threads, monkeypatch):
    taken, late = [], SimpleQueue()
    monkeypatch.setattr(runtime, "_jobs", late)  # which no thread looks at
    monkeypatch.setattr(runtime, "_helpers", lambda wanted: wanted)

    def work(first, last):
        taken.append(first)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runtime.run_ranges(work, 4, 1 << 20)
    late.get_nowait()()  # a thread takes it now
    assert taken == [0]


def test_threads_hold_on_to_the_memory_of_a_kernel():
    """Whatever unwinds the caller: the addresses are good as long as a thread may use them."""

    class Memory:
        gone = False

        def __del__(self):
            Memory.gone = True

    held = []
    original = runtime.run_ranges
    runtime.run_ranges = lambda work, count, elements: held.append(work) or []
    try:
        runtime.run_kernel(None, lambda first, last: (), 1, 1, Memory())
    finally:
        runtime.run_ranges = original
    assert not Memory.gone
    held.clear()
    assert Memory.gone


@pytest.mark.parametrize("helpers", ["started", "new"])
def test_an_exception_at_any_instruction_leaves_nobody_at_work(two_threads, monkeypatch, helpers):
    at_work = []
    queue = SimpleQueue()
    monkeypatch.setattr(runtime, "_jobs", queue)
    monkeypatch.setattr(runtime, "_started", [])

    def work(first, last):
        at_work.append(first)
        time.sleep(0.0005)
        at_work.remove(first)
        return first, last

    def run():
        return runtime.run_ranges(work, 4, 1 << 20)

    assert run() == [(0, 2), (2, 4)]
    number, finished = 0, False
    while not finished:
        if helpers == "new":
            runtime._started.clear()
        finished = not interrupted_at(number, runtime, run)
        assert at_work == [], f"interrupted at instruction {number}"
        assert run() == [(0, 2), (2, 4)], f"after an interrupt at instruction {number}"
        number += 1
    assert number > 100, "all of it was counted"
    for _ in range(number):
        queue.put(_thread.exit)


class NewKernel:
    """A kernel that is not in the cache on disk."""

    __name__ = "new"
    py_func = SimpleNamespace(__module__="kernels")
    stats = SimpleNamespace(cache_hits={})


def test_the_compiler_is_never_interrupted(alarms, monkeypatch):
    """Its lock would stay with the main thread, and helpers that need it would wait for ever."""
    monkeypatch.setattr(runtime, "_compiled", {})
    in_main_thread = []

    class Dispatcher(NewKernel):
        overloads: ClassVar = {(): SimpleNamespace(entry_point=lambda: "called")}

        def compile(self, signature):
            time.sleep(0.05)
            in_main_thread.append(threading.current_thread() is threading.main_thread())

    dispatcher = Dispatcher()
    alarms(0.01)
    with pytest.raises(Interrupted):
        runtime.kernel(dispatcher)
    assert runtime.kernel(dispatcher)() == "called"
    assert in_main_thread and not any(in_main_thread), "the compile that nobody waited for was completed, too"


def test_an_error_of_the_compiler_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(runtime, "_compiled", {})

    class Dispatcher(NewKernel):
        def compile(self, signature):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runtime.kernel(Dispatcher())


def test_a_table_of_scratch_memory_is_there_only_when_it_is_complete(monkeypatch):
    """Decoding would take what it finds in the table for numbers, and give garbage from then on."""
    tables = decoders._Tables()

    def interrupted(*arguments, **options):
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(decoders.torch, "arange", interrupted)
        with pytest.raises(Interrupted):
            tables.mine()
    assert torch.equal(tables.mine().view(torch.uint8)[1024:], torch.arange(256, dtype=torch.uint8))
