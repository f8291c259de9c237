"""Signals while kernels run on several threads: nobody writes to memory that the program has let go."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from crossgrain.kernels.cpu import runtime


class Interrupted(Exception):
    pass


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "2")
    monkeypatch.setattr(runtime, "_ELEMENTS_PER_THREAD", 1)


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
    taken, helpers = [], []
    monkeypatch.setattr(runtime, "_submit", lambda work, count: helpers.append(work) or [])

    def work(first, last):
        taken.append(first)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runtime.run_ranges(work, 4, 1 << 20)
    helpers[0]()  # the pool starts it now
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
