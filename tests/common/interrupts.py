"""Interrupts at random moments, and memory between canaries, for tests of what an interrupt leaves behind."""

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

import crossgrain as cg

_random = random.SystemRandom()  # whatever a work does to the usual generators
CANARY = 0xA5
GAP = 256  # bytes of canary before, between and after tensors


class Arena:
    """Tensors that lie between canaries in one piece of memory."""

    def __init__(self, size: int) -> None:
        self._memory = torch.full((size,), CANARY, dtype=torch.uint8)
        self._end, self._parts = GAP, []

    def adopt(self, tensor: torch.Tensor) -> None:
        """Move the buffers of a tensor, quantized or not, into the arena. The tensor stays the same object."""
        buffers = [b for _, b in tensor._buffers()] if isinstance(tensor, cg.QuantizedTensor) else [tensor]
        for buffer in buffers:
            size = buffer.numel() * buffer.element_size()
            place = self._memory[self._end : self._end + size]
            new = place.view(buffer.dtype).view(buffer.shape)
            new.copy_(buffer)
            buffer.data = new
            self._parts.append((self._end, size))
            self._end += -(-size // 64) * 64 + GAP
        assert self._end <= len(self._memory), "the arena is too small"

    def check_canaries(self) -> None:
        last = 0
        for start, size in [*self._parts, (len(self._memory), 0)]:
            assert bool((self._memory[last:start] == CANARY).all()), f"somebody wrote before {start}"
            last = start + size

    def check_quiet(self) -> None:
        """Nobody is writing."""
        before = self._memory.clone()
        time.sleep(0.0005)  # long enough for a thread that is still at work
        assert torch.equal(self._memory, before), "somebody is still writing"


def _exposed(work: Callable[[], Any]) -> None:
    work()


@contextmanager
def _alarms(raises: int, delays: Callable[[], float]) -> Iterator[None]:
    """So many signals, of which each raises KeyboardInterrupt, but only where `_exposed` runs."""
    left = raises

    def handle(number: int, frame: Any) -> None:
        nonlocal left
        while frame is not None and frame.f_code is not _exposed.__code__:
            frame = frame.f_back
        if frame is not None and left:
            left -= 1
            if left:
                signal.setitimer(signal.ITIMER_REAL, delays())
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(work: Callable[[], Any], after: float, raises: int = 1) -> bool:
    """Run ``work``; interrupt it after so many seconds, and again soon after. Returns whether it was interrupted."""
    grad = torch.is_grad_enabled()
    with _alarms(raises, lambda: _random.uniform(1e-6, 3e-4)):
        try:
            signal.setitimer(signal.ITIMER_REAL, max(after, 1e-6))
            _exposed(work)
            return False
        except BaseException as error:
            if not _is_due_to_an_interrupt(error):
                raise
            torch.set_grad_enabled(grad)  # if torch itself was interrupted while it entered or left a context
            return True


def _is_due_to_an_interrupt(error: BaseException | None) -> bool:
    """An error while an interrupt is on its way up stands for it: Python's own rmtree closes a file twice then."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def moments(work: Callable[[], Any], count: int) -> Iterator[float]:
    """Random moments in the time that ``work`` takes."""
    lasts = []
    for _ in range(4):  # kernels are loaded the first time
        start = time.perf_counter()
        work()
        lasts.append(time.perf_counter() - start)
    for _ in range(count):
        yield _random.uniform(0, 1.1 * min(lasts))


def interrupted_at(number: int, module: ModuleType, work: Callable[[], Any]) -> bool:
    """Run ``work``; interrupt it before an instruction, of which those in the functions of a module are counted.

    Returns whether there were that many instructions.
    """
    left = number

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt  # which ends tracing
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
