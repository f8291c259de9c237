"""The line of the user's program that a warning should name."""

from __future__ import annotations

import os
import sys

import torch

_PACKAGES = tuple(
    os.path.dirname(path) + os.sep for path in (os.path.dirname(os.path.abspath(__file__)), str(torch.__file__))
)


def levels_to_caller() -> int:
    """The ``stacklevel`` for `warnings.warn` at which the caller of crossgrain, and of torch above it, is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        level, frame = level + 1, frame.f_back
    return level
