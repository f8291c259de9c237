"""Call kernels. They are compiled once per tuple of tags, and run on several threads if that is faster.

Kernels release the GIL and own no memory, so ranges of rows can run in a small pool of Python threads. There is no
second OpenMP runtime beside torch's, any number of callers can run at once, and a fork is possible.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.core.compiler_lock import global_compiler_lock

from .jobs import SLOT, jobs, work_tag
from .tags import Tag, TagType

_ELEMENTS_PER_THREAD = 1 << 18  # with fewer numbers, another thread costs more time than it saves

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def kernel(dispatcher: Any, *arguments: Any) -> Callable[..., Any]:
    """The machine code of ``dispatcher`` for arguments of these types.

    Versions of a kernel differ only in their tags; the types of other arguments follow from their positions.
    """
    key = (dispatcher, *[argument.name for argument in arguments if type(argument) is Tag])
    entry = _compiled.get(key)
    if entry is None:
        with global_compiler_lock:
            signature = tuple(map(_numba_type, arguments))
            dispatcher.compile(signature)
            entry = _compiled[key] = dispatcher.overloads[signature].entry_point
    return entry


class Compiled(NamedTuple):
    """The kernels of this process.

    Attributes:
        kernels: number of all kernels.
        from_disk: number of those that were loaded from the cache on disk.
        directory: where the cache is; None if it is not known.
    """

    kernels: int
    from_disk: int
    directory: str | None


def compiled_so_far() -> Compiled:
    stats = [dispatcher.stats for dispatcher in {key[0] for key in _compiled}]
    from_disk = sum(sum(each.cache_hits.values()) for each in stats)
    return Compiled(len(_compiled), from_disk, next((each.cache_path for each in stats), None))


def _numba_type(argument: Any) -> Any:
    if isinstance(argument, Tag):
        return TagType(argument.name)
    return {int: types.intp, float: types.float32, bool: types.boolean}[type(argument)]


def thread_count(elements: int) -> int:
    """The number of threads for so many numbers, at most CROSSGRAIN_NUM_THREADS or torch's number of threads."""
    wanted = int(os.environ.get("CROSSGRAIN_NUM_THREADS") or 0) or torch.get_num_threads()
    return max(1, min(wanted, elements // _ELEMENTS_PER_THREAD))


def run_ranges(work: Callable[[int, int], Any], count: int, elements: int) -> list[Any]:
    """Run ``work(first, last)`` for ``range(count)``, divided into one range per thread. Returns the results."""
    threads = 1 if elements < 2 * _ELEMENTS_PER_THREAD else min(thread_count(elements), count)
    if threads <= 1:
        return [work(0, count)]
    ranges = deque(enumerate(pairwise(count * i // threads for i in range(threads + 1))))
    results: list[Any] = [None] * threads
    gates = [threading.RLock() for _ in range(threads - 1)]  # each held by a helper while it may be writing
    unused = deque(gates)

    def take_ranges() -> None:
        while True:
            try:
                i, (first, last) = ranges.popleft()
            except IndexError:  # no ranges are left
                return
            results[i] = work(first, last)

    def help_out() -> None:
        gate = unused.popleft()
        if gate.acquire(blocking=False):  # else it is over, and the caller holds the gate
            try:
                take_ranges()
            finally:
                gate.release()

    try:
        helpers = _submit(help_out, threads - 1)
        take_ranges()
        for helper in helpers:
            if not helper.cancel():  # a thread that has not started has nothing to do
                helper.result()
    except BaseException:  # also an interrupt: whoever handles it may free the memory that helpers write to
        ranges.clear()
        for gate in gates:
            _pass(gate)
        raise
    return results


def _pass(gate: Any) -> None:
    """Wait for the helper that holds the gate, whatever interrupts the waiting: an interrupt is on its way up already.

    All time is spent inside ``acquire``, where another one is caught. Memory does not depend on it: helpers own what
    they write to (`run_kernel`).
    """
    while True:
        try:
            gate.acquire()
            return
        except BaseException:
            continue


Arguments = tuple[Any, ...]  # of a kernel: numbers or arrays of them, then tags


def run_kernel(
    dispatcher: Any, arguments: Callable[[Any, Any], Arguments], count: Any, elements: int, keep: Any = None
) -> list[Any]:
    """Run a kernel for ``range(count)``, on several threads if that is faster.

    Args:
        dispatcher: the kernel.
        arguments: returns the arguments of the kernel for a range from first to last.
        count: the number of steps; or an array with a number for each group. Arguments may then be arrays as well, and
            each thread works on all its groups in one call.
        elements: number of all numbers, by which the number of threads is chosen.
        keep: owns the memory that the arguments are addresses of; every thread that runs the kernel holds on to it.
    """
    if isinstance(count, int):

        def work(first: int, last: int, keep: Any = keep) -> Any:
            given = arguments(first, last)
            return kernel(dispatcher, *given)(*given)

        return run_ranges(work, count, elements)
    parts = run_groups(dispatcher, arguments, count, elements, keep)
    return [result for part in parts for result in part.results.tolist()]


class PartOfGroups(NamedTuple):
    """The result of a thread: one result for each of some groups."""

    groups: np.ndarray[Any, Any]
    results: np.ndarray[Any, Any]


def run_groups(
    dispatcher: Any,
    arguments: Callable[[Any, Any], Arguments],
    counts: np.ndarray[Any, Any],
    elements: int,
    keep: Any = None,
) -> list[PartOfGroups]:
    """Run a kernel for ``range(count)`` of each group. The work is divided evenly, so threads may share a group."""
    ends = np.cumsum(counts)

    def work(first: int, last: int, keep: Any = keep) -> PartOfGroups:
        begin, end = (np.clip(limit - (ends - counts), 0, counts) for limit in (first, last))
        groups = np.flatnonzero(begin < end)
        given = arguments(begin, end)
        values = [value for value in given if type(value) is not Tag]
        tags = [value.name for value in given if type(value) is Tag]
        table = np.empty((len(groups), len(values)), np.int64)
        for place, value in enumerate(values):
            column = table.view(np.float32)[:, 2 * place] if _kind(value) == "f" else table[:, place]
            column[:] = value[groups] if isinstance(value, np.ndarray) else value
        results = np.empty(len(groups), np.int64)
        call = (
            table.ctypes.data, len(groups), len(values) * SLOT, results.ctypes.data,
            work_tag(dispatcher.__name__, "".join(map(_kind, values)), tags),
        )  # fmt: skip
        kernel(jobs, *call)(*call)
        return PartOfGroups(groups, results)

    return run_ranges(work, int(ends[-1]), elements)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "f" if value.dtype == np.float32 else "i"
    return {bool: "b", float: "f", int: "i"}[type(value)]


def _submit(work: Callable[[], None], workers: int) -> list[Future[None]]:
    """Run ``work`` on other threads. There are none while the interpreter shuts down."""
    helpers: list[Future[None]] = []
    try:
        for _ in range(workers):
            helpers.append(_pool(workers).submit(work))
    except RuntimeError:
        pass
    return helpers


def _pool(workers: int) -> ThreadPoolExecutor:
    key = (os.getpid(), workers)  # threads do not survive a fork
    pool = _pools.get(key)
    if pool is None:
        pool = _pools.setdefault(key, _new_pool(workers))
    return pool


def _new_pool(workers: int) -> ThreadPoolExecutor:
    # A thread inherits flush-to-zero from the thread that starts it, and would keep it.
    return ThreadPoolExecutor(workers, "crossgrain", initializer=lambda: torch.set_flush_denormal(False))


# In the child of a fork, the lock of the compiler must not be held by a thread that does not exist there.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)
