"""The line of the user's program that a warning should name."""

from __future__ import annotations

import contextlib
import os
import sys

import torch

from .torch_patches.compiler_marks import constant_in_graphs

_PACKAGES = (
    *(os.path.dirname(path) + os.sep for path in (os.path.dirname(os.path.abspath(__file__)), str(torch.__file__))),
    contextlib.__file__,  # between a `with` of the user and a context manager of ours
)


def levels_to_caller() -> int:
    """The ``stacklevel`` of `logging` and `warnings` at which the caller of crossgrain, and of torch above it, is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        level, frame = level + 1, frame.f_back
    return level


@constant_in_graphs
def line_of_caller() -> str:
    """That line, as "train.py, line 12", for messages about something that has no name."""
    frame = sys._getframe(levels_to_caller() - 1)
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
