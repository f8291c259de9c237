"""Call kernels. They are compiled once per tuple of tags, and run on several threads if that is faster.

Kernels release the GIL and own no memory, so ranges of rows can run in a small pool of Python threads. There is no
second OpenMP runtime beside torch's, any number of callers can run at once, and a fork is possible.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.core.compiler_lock import global_compiler_lock

from .announcing import announced
from .compiling import collector_waiting
from .jobs import SLOT, jobs, work_tag
from .tags import Tag, TagType

ELEMENTS_PER_THREAD = 1 << 18  # with fewer numbers, another thread costs more time than it saves

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
_addresses: dict[tuple[Any, ...], int] = {}


def kernel(dispatcher: Any, *arguments: Any) -> Callable[..., Any]:
    """The machine code of ``dispatcher`` for arguments of these types.

    Versions of a kernel differ only in their tags; the types of other arguments follow from their positions.
    """
    key = (dispatcher, *[argument.name for argument in arguments if type(argument) is Tag])
    entry = _compiled.get(key)
    if entry is None:
        _undisturbed(partial(_compile, key, arguments))
        entry = _compiled[key]
    return entry


def address(dispatcher: Any, *arguments: Any) -> int:
    """The address of a kernel's machine code, by which other kernels call it; see `calling`.

    Callers pass numbers as they are. So the types of arguments are part of the key: machine code for an integer must
    not get a float in its place.
    """
    key = (dispatcher, *[argument.name if type(argument) is Tag else kind_of(argument) for argument in arguments])
    found = _addresses.get(key)
    if found is None:
        signature = tuple(map(_numba_type, arguments))
        kernel(dispatcher, *arguments)
        if signature not in dispatcher.overloads:  # it was compiled for other types
            _undisturbed(partial(_compile, key, arguments))
        made = dispatcher.overloads[signature]
        if made.signature.return_type != types.intp:
            raise TypeError(
                f"{dispatcher.__name__} returns {made.signature.return_type}; its callers expect an integer"
            )
        found = _addresses[key] = made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)
    return found


def _compile(key: tuple[Any, ...], arguments: Sequence[Any]) -> None:
    dispatcher, signature = key[0], tuple(map(_numba_type, arguments))
    with global_compiler_lock, announced(dispatcher), collector_waiting():
        dispatcher.compile(signature)
        _compiled[key] = dispatcher.overloads[signature].entry_point


def _undisturbed(work: Callable[[], None]) -> None:
    """Run ``work`` on a thread that no signal interrupts: handlers run in the main thread, which only waits.

    An exception inside the compiler could leave its lock held or its tables half filled. The work is completed even
    if the wait for it is interrupted.
    """
    exposed = threading.get_ident() == threading.main_thread().ident
    if not exposed or _at_exit.is_set() or global_compiler_lock.is_locked():
        return work()
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            work()
            outcome.put(None)
        except BaseException as error:
            outcome.put(error)

    _thread.start_new_thread(run, ())
    error = outcome.get()
    if error is not None:
        raise error
    return None


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
    return max(1, min(wanted, elements // ELEMENTS_PER_THREAD))


def run_ranges(work: Callable[[int, int], Any], count: int, elements: int) -> list[Any]:
    """Run ``work(first, last)`` for ``range(count)``, divided into one range per thread. Returns the results.

    Nobody is still at work when it returns or raises, whatever is raised in this thread: whoever handles an interrupt
    may free or reuse the memory that is being written.
    """
    threads = 1 if elements < 2 * ELEMENTS_PER_THREAD else min(thread_count(elements), count)
    if threads <= 1:
        return [work(0, count)]
    ranges = deque(enumerate(pairwise(count * i // threads for i in range(threads + 1))))
    results: list[Any] = [None] * threads
    errors: list[BaseException] = []
    gate = new_gate()

    def take_ranges() -> None:
        while True:
            try:
                i, (first, last) = ranges.popleft()
            except IndexError:  # no ranges are left
                return
            results[i] = work(first, last)

    def help_out() -> None:
        if enter(gate) != 0:  # it is over
            return
        try:
            take_ranges()
        except BaseException as error:
            errors.append(error)
        finally:
            leave(gate)

    try:
        for _ in range(_helpers(threads - 1)):
            _jobs.put(help_out)
        take_ranges()
        close(gate)
    except BaseException:
        close(gate)  # must be the first call: before it, no signal's handler runs
        raise
    if errors:
        raise errors.pop()
    return results


# Helpers are inside a gate while they work. The caller closes it: that waits for all who are inside, and keeps others
# out. It is a lock of the operating system, shared by helpers, because waiting for a lock of Python ends as soon as a
# signal's handler raises. Closing it twice does nothing.
_system = ctypes.CDLL(None)
enter, leave, close = (getattr(_system, f"pthread_rwlock_{name}") for name in ("tryrdlock", "unlock", "wrlock"))


def new_gate() -> Any:
    gate = ctypes.create_string_buffer(256)  # at least the size of pthread_rwlock_t
    _system.pthread_rwlock_init(gate, None)
    return gate


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
        tags = [value for value in given if type(value) is Tag]
        table = np.empty((len(groups), len(values)), np.int64)
        for place, value in enumerate(values):
            column = table.view(np.float32)[:, 2 * place] if kind_of(value) == "f" else table[:, place]
            column[:] = value[groups] if isinstance(value, np.ndarray) else value
        results = np.empty(len(groups), np.int64)
        kinds = "".join(map(kind_of, values))
        example = [EXAMPLES[kind] for kind in kinds]
        call = (
            address(dispatcher, *example, *tags), table.ctypes.data, len(groups), len(values) * SLOT,
            results.ctypes.data, work_tag(kinds, len(tags)),
        )  # fmt: skip
        kernel(jobs, *call)(*call)
        return PartOfGroups(groups, results)

    return run_ranges(work, int(ends[-1]), elements)


EXAMPLES: dict[str, int | float | bool] = {"i": 0, "f": 0.0, "b": False}  # of each kind of arguments


def kind_of(value: Any) -> str:
    """The kind of an argument of a kernel, as `jobs.work_tag` names it."""
    if isinstance(value, np.ndarray):
        return "f" if value.dtype == np.float32 else "i"
    return {bool: "b", float: "f", int: "i"}[type(value)]


# Helpers are threads that take jobs from a queue, for all callers. Each step of starting them and of handing them a job
# is one call of C, so that an exception between two steps breaks nothing; and nobody waits for a job to begin.
_jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
_started: list[int] = []
_at_exit = threading.Event()
_LONGEST_WAIT = 10.0  # seconds that the end of the program waits for helpers, should one hang


def _helpers(wanted: int) -> int:
    """The number of helpers, after more were started if there are fewer than ``wanted``; at most that many."""
    if _at_exit.is_set():
        return 0
    try:
        while len(_started) < wanted:
            _started.append(_thread.start_new_thread(_serve, (_jobs,)))
    except RuntimeError:  # there can be no more threads
        pass
    return min(len(_started), wanted)


def _serve(jobs: SimpleQueue[Callable[[], None]]) -> None:
    torch.set_flush_denormal(False)  # a thread inherits it from the thread that starts it, and would keep it
    while True:
        jobs.get()()  # not kept in a variable: a job owns tensors


def _forget_helpers() -> None:
    """In the child of a fork, where they are not."""
    global _jobs
    _jobs = SimpleQueue()
    _started.clear()


def _park_helpers() -> None:
    """Let helpers finish, and wait for a lock for ever. It is called at the end of the program.

    When the interpreter shuts down, it ends each thread as soon as that asks for the GIL. In C++ code this aborts the
    process. Waiting for a lock is harmless; to end here would not be, because a thread that ends frees its tensors.
    Ctrl-C ends the wait.
    """
    _at_exit.set()
    parked: SimpleQueue[None] = SimpleQueue()
    lock = _thread.allocate_lock()
    lock.acquire()

    def park() -> None:
        parked.put(None)
        lock.acquire()

    helpers = len(_started)  # another thread may be starting one more
    for _ in range(helpers):
        _jobs.put(park)
    latest = time.monotonic() + _LONGEST_WAIT
    with suppress(Empty, KeyboardInterrupt):
        for _ in range(helpers):
            parked.get(timeout=max(0.0, latest - time.monotonic()))


os.register_at_fork(after_in_child=_forget_helpers)
atexit.register(_park_helpers)


# In the child of a fork, the lock of the compiler must not be held by a thread that does not exist there.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)
