"""A bar on the terminal that shows how far a long computation is, and how long it will still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

OnProgress = Callable[[float, str], None]  # the part that is done, from 0 to 1, and what is being done

_WIDTH = 30
_EVERY = 0.1  # seconds between two drawings


class Progress:
    """A context manager around a computation, which calls `add` whenever a part is done.

    Args:
        title: what is computed.
        on_progress: called instead of drawing a bar.

    Attributes:
        total: how much there is to do, in any unit.
    """

    def __init__(self, title: str, on_progress: OnProgress | None = None) -> None:
        self.total = 1.0
        self._title, self._tell = title, on_progress
        self._done = self._part = 0.0
        self._begin = self._drawn = time.monotonic()
        self._draws = on_progress is None and sys.stderr.isatty()

    def add(self, amount: float, text: str) -> None:
        """So much more is done. ``text`` says of what."""
        self._done += amount
        part = self._part = max(self._part, min(1.0, self._done / self.total))  # never back, if the total has changed
        if self._tell is not None:
            self._tell(part, text)
        elif self._draws and time.monotonic() - self._drawn > _EVERY:
            self._drawn = time.monotonic()
            left = (self._drawn - self._begin) * (1 - part) / part
            filled = round(_WIDTH * part)
            bar = "█" * filled + "·" * (_WIDTH - filled)
            print(
                f"\r\x1b[K{self._title} {bar} {100 * part:3.0f} %, {_duration(left)} left: {text}"[:110],
                end="",
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._draws:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
