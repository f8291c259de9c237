"""Where a training step makes the host wait for a GPU, as torch tells it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import crossgrain

from ..gpu.fake_cuda.allowed import ALLOWED, REFERENCE
from ..gpu.fake_cuda.runs import RUNS, SHORT
from .finding import Deadline, Finding, check_each
from .training import results_of

_SOURCE = Path(crossgrain.__file__).parent
_MESSAGE = "called a synchronizing CUDA operation"
_PLACES = {place for _, place in ALLOWED}


def check_waits(device: torch.device, deadline: Deadline, names: list[str] = SHORT) -> Finding:
    """Run steps twice, and look where the second one waits. The first compiles kernels.

    torch could raise instead of warning, but then a step would end at the first place where it may wait.
    """
    places: dict[str, set[str]] = {}

    def check(name: str) -> None:
        results_of(RUNS[name], device.type)
        with watched(device) as seen:
            results_of(RUNS[name], device.type)
        for place in seen:
            places.setdefault(place, set()).add(name)
        wrong = sorted(place for place in seen if not is_allowed(place))
        assert not wrong, f"the host waits in {', '.join(wrong)}"

    found = check_each(((name, name) for name in names), check, deadline)
    found.numbers["places"] = {place: sorted(runs)[:3] for place, runs in sorted(places.items())}
    return found


def is_allowed(place: str) -> bool:
    """Whether the host may wait in a place, such as "nn/base.py: forward". Outside of crossgrain it may."""
    return place == "" or place in _PLACES or place.startswith(REFERENCE)


@contextmanager
def watched(device: torch.device) -> Iterator[set[str]]:
    """Context manager: the set gets the places of crossgrain where the host waits for a GPU."""
    seen: set[str] = set()
    before = warnings.showwarning

    def show(message: Warning | str, *rest: Any, **options: Any) -> None:
        if _MESSAGE in str(message):
            seen.add(_own_place())
        else:
            before(message, *rest, **options)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_MESSAGE}.*")
        warnings.showwarning = show
        _tell_waits(device, "warn")
        try:
            yield seen
        finally:
            _tell_waits(device, "default")


def _tell_waits(device: torch.device, mode: str) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def _own_place() -> str:
    """File and function of crossgrain that run now; "" if there is none on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_SOURCE):
            return f"{path.relative_to(_SOURCE).as_posix()}: {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
