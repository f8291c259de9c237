"""What a check has found, and how long it may look."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

_Item = TypeVar("_Item")

SHOWN = 20
"""Problems of one check that a report has; of the rest it has the number."""


@dataclass
class Finding:
    """What a check has found.

    Attributes:
        numbers: what was measured or counted, by name; plain data.
        problems: what is wrong, in words. A check without problems has passed.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        more = len(self.problems) - SHOWN
        shown = self.problems[:SHOWN] + ([f"and {more} more"] if more > 0 else [])
        return {**asdict(self), "problems": shown}


class Deadline:
    """The end of the time that a check has.

    Args:
        seconds: time from now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._end


def check_each(items: Iterable[tuple[str, _Item]], check: Callable[[_Item], None], deadline: Deadline) -> Finding:
    """Check items by name until the time is over. What a check raises is a problem.

    Returns:
        How many items were checked, how many were left for want of time, and what is wrong.
    """
    found, done, left = Finding(), 0, 0
    for name, item in items:
        if deadline.is_over:
            left += 1
            continue
        done += 1
        try:
            check(item)
        except Exception as error:
            found.problems.append(f"{name}: {_first_lines(error)}")
    found.numbers = {"checked": done, "not_reached": left, "wrong": len(found.problems)}
    if not done:
        found.problems.append("nothing was checked")
    return found


def attempted(check: Callable[[], Finding]) -> Finding:
    """What a check finds; if it raises, that is its problem. For what is only to be reported."""
    try:
        return check()
    except Exception as error:
        return Finding({}, [_first_lines(error)])


def _first_lines(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}"
