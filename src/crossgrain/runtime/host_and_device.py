"""Numbers that go from the host to a device or back, without making the host wait for a GPU.

A GPU runs behind the host. Reading a number of it (`item`, `tolist`, `torch.equal`), or copying from memory that is not
pinned, makes the host wait until the GPU has caught up, and no work is queued meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def on_device(
    numbers: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of numbers of the host on a device. A copy to a GPU is made from pinned memory, without waiting."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def number_on(number: Tensor, device: torch.device) -> Tensor:
    """A tensor with one number on another device. A number of the CPU travels with the launch of a kernel."""
    if number.device.type != "cpu" or device.type != "cuda":
        return number.to(device)
    return torch.full(number.shape, float(number), dtype=number.dtype, device=device)


def require(
    holds: Tensor, rule: str, details: Callable[[], str], error: Callable[[str], Exception] = ValueError
) -> None:
    """Raise unless ``holds``. A GPU checks it by itself, and stops the program if it does not hold.

    Args:
        holds: a bool tensor with one element.
        rule: what must hold, in words; a GPU prints it, and every later CUDA call of the program raises.
        details: a function that returns the message of the error for other devices, which may read tensors.
        error: class of the error for other devices.
    """
    if holds.device.type == "cuda":
        torch._assert_async(holds, rule)
    elif not bool(holds):
        raise error(details())


class _Waiting(NamedTuple):
    """A number on its way to the host."""

    number: Tensor
    arrival: torch.Event
    then: Callable[[float], None]


_waiting: deque[_Waiting] = deque()
_lock = threading.Lock()


def tell_later(number: Tensor, then: Callable[[float], None]) -> None:
    """Call ``then`` with a number of a device: at once, or for a GPU in a later call of this function.

    Args:
        number: a tensor with one element.
        then: what to do with it, after it has arrived. It is never called for the last numbers of a program, nor for
            those of a CUDA graph.
    """
    if number.device.type != "cuda":
        then(float(number))
        return
    if torch.cuda.is_current_stream_capturing():  # what is recorded in a graph has not happened
        return
    for each in _arrived():
        each.then(float(each.number))
    here = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
    arrival = torch.Event(number.device)
    arrival.record(torch.cuda.current_stream(number.device))
    _waiting.append(_Waiting(here, arrival, then))


def _arrived() -> list[_Waiting]:
    """The numbers that have arrived, which are then no longer waited for."""
    found: list[_Waiting] = []
    with _lock:
        while _waiting and _waiting[0].arrival.query():
            found.append(_waiting.popleft())
    return found
