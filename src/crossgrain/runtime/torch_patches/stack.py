"""Whether code of a package of torch is on the call stack."""

from __future__ import annotations

import sys
from types import FrameType


def is_running(*packages: str) -> bool:
    """Whether a function of one of these packages, which need not be imported, is on the call stack."""
    if not any(package in sys.modules for package in packages):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(packages):
            return True
        frame = frame.f_back
    return False
