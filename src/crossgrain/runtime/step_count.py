"""The number of the current step, for messages.

A step begins with the outermost autocast, or with a call of a model or module that is bound to a recipe. The backward
pass belongs to the step that has begun last.
"""

from __future__ import annotations

from itertools import count

_numbers = count(1)
_current = 0


def begin_step() -> None:
    """Note that a step begins."""
    global _current
    _current = next(_numbers)


def current_step() -> int:
    """The number of steps that have begun in this process."""
    return _current
