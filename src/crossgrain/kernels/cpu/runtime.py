"""Calling kernels: compiled once per tuple of tags, run on several threads where that pays.

Kernels release the GIL and own nothing, so ranges of rows go to a small pool of Python threads: no
second OpenMP runtime beside torch's, any number of callers at once, and nothing left over after a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from numba import types

from .tags import Tag, TagType

_ELEMENTS_PER_THREAD = 1 << 18  # below this, starting another thread costs more than it saves

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
_compiling = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def kernel(dispatcher: Any, *arguments: Any) -> Callable[..., Any]:
    """The machine code of ``dispatcher`` for arguments of these types."""
    key = (dispatcher, *map(_kind, arguments))
    entry = _compiled.get(key)
    if entry is None:
        with _compiling:  # numba compiles one thing at a time anyway
            signature = tuple(map(_numba_type, arguments))
            dispatcher.compile(signature)
            entry = _compiled[key] = dispatcher.overloads[signature].entry_point
    return entry


def _kind(argument: Any) -> Any:
    return argument if isinstance(argument, Tag) else type(argument)


def _numba_type(argument: Any) -> Any:
    if isinstance(argument, Tag):
        return TagType(argument.name)
    return {int: types.intp, float: types.float32, bool: types.boolean}[type(argument)]


def thread_count(elements: int) -> int:
    """How many threads to use for this many elements."""
    wanted = int(os.environ.get("CROSSGRAIN_NUM_THREADS") or 0) or torch.get_num_threads()
    return max(1, min(wanted, elements // _ELEMENTS_PER_THREAD))


def run_ranges(work: Callable[[int, int], Any], count: int, elements: int) -> list[Any]:
    """``work(first, last)`` over ``range(count)``, cut into as many ranges as threads."""
    threads = min(thread_count(elements), count)
    if threads <= 1:
        return [work(0, count)]
    cuts = [count * i // threads for i in range(threads + 1)]
    others = [_pool(threads - 1).submit(work, first, last) for first, last in pairwise(cuts[1:])]
    return [work(cuts[0], cuts[1]), *(future.result() for future in others)]


def _pool(workers: int) -> ThreadPoolExecutor:
    key = (os.getpid(), workers)  # threads do not survive a fork
    pool = _pools.get(key)
    if pool is None:
        pool = _pools.setdefault(key, _new_pool(workers))
    return pool


def _new_pool(workers: int) -> ThreadPoolExecutor:
    # A thread inherits flush-to-zero from the one that starts it, and would keep it.
    return ThreadPoolExecutor(workers, "crossgrain", initializer=lambda: torch.set_flush_denormal(False))
