"""A line on the terminal about kernels that were compiled, if that took long: nobody should wonder what takes time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...runtime.settings import settings

_LONG = 1.0  # seconds: less is not worth a line, and each line waits for so much more than the one before

_untold: list[str] = []  # kernels that no line has told of yet
_seconds = 0.0  # what they took
_lines = 0  # that were written


@contextmanager
def announced(dispatcher: Any) -> Iterator[None]:
    """Compile a kernel inside of this. A line is printed as soon as the kernels that it tells of took over a second.

    Kernels that come from the cache on disk are not mentioned.
    """
    global _seconds
    hits, start = sum(dispatcher.stats.cache_hits.values()), time.perf_counter()
    yield
    if sum(dispatcher.stats.cache_hits.values()) > hits:
        return
    _seconds += time.perf_counter() - start
    _untold.append(f"{dispatcher.py_func.__module__.rpartition('.')[2]}.{dispatcher.__name__}")
    if _seconds >= _LONG * (1 + _lines):
        _tell()


def _tell() -> None:
    global _seconds, _lines
    names, seconds, number = ", ".join(dict.fromkeys(_untold)), _seconds, len(_untold)
    _untold.clear()
    _seconds = 0.0
    if not settings.announce_compiling or sys.stderr is None or not sys.stderr.isatty():
        return
    once = "" if _lines else " Kernels are kept on disk for later runs; `crossgrain warmup` compiles them in advance."
    _lines += 1
    kernels = "a kernel" if number == 1 else f"{number} kernels"
    print(f"crossgrain: compiled {kernels} in {seconds:.1f} s ({names}).{once}", file=sys.stderr, flush=True)
