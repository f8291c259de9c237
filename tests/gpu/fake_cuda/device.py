"""The emulated device inside a process: what torch asks of CUDA in Python, and what the device tells about waiting.

The process must have been started with the compiled device in LD_PRELOAD, see `build`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

import crossgrain

CAPABILITY = (9, 0)
_SOURCE = str(Path(crossgrain.__file__).parent) + os.sep
_Told = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong)


@dataclass(frozen=True)
class Wait:
    """One time that the host had to wait for the device.

    Attributes:
        kind: "read" (numbers came to the host), "upload" (a copy from memory that is not pinned) or "mixed" (an
            operator got tensors of both).
        operator: name of the operator of torch.
        place: file and function of crossgrain that called it, such as "nn/base.py: forward"; "" if there is none.
        calls: the last lines of crossgrain on the way there.
        stream: number of the stream on which it happened; 0 is the default stream.
    """

    kind: str
    operator: str
    place: str
    calls: str
    stream: int


_waits: list[Wait] | None = None


@_Told
def _told(kind: bytes, operator: bytes, stream: int) -> None:
    if _waits is not None:
        frames = list(_own_frames())
        named = (frame for frame in frames if not frame.f_code.co_name.startswith("<"))  # not <listcomp>
        place = next((f"{_file(frame)}: {frame.f_code.co_name}" for frame in named), "")
        calls = " < ".join(f"{_file(frame)}:{frame.f_lineno}" for frame in frames[:5])
        _waits.append(Wait(kind.decode(), operator.decode(), place, calls, stream))


def _own_frames() -> Iterator[FrameType]:
    """The frames of crossgrain in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_SOURCE):
            yield frame
        frame = frame.f_back


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(_SOURCE)


def install() -> None:
    """Let torch's Python side find the device."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.set_listener(_told)
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: SimpleNamespace(major=CAPABILITY[0], minor=CAPABILITY[1]),
        "is_current_stream_capturing": lambda: _capturing,
        "set_device": lambda device: None,
        "Stream": lambda device=None, priority=0: torch.Stream("cuda"),
        "Event": lambda **options: torch.Event("cuda"),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "stream": _on_stream,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),  # kernels of the CPU draw the numbers
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    # What the CPU build of torch cannot do with storages of the device
    torch.UntypedStorage.clone = lambda self: _bytes_of(self).clone().untyped_storage()  # type: ignore[method-assign]
    torch.UntypedStorage.cpu = _host_storage  # type: ignore[method-assign]
    _let_resize(library)


@contextmanager
def _on_stream(stream: torch.Stream) -> Iterator[None]:
    with stream:
        yield


def _let_resize(library: Any) -> None:
    resize: Any = torch.UntypedStorage.resize_
    library.resize_storage.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type == "cuda":
            library.resize_storage(storage._cdata, size)
            return storage
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    count = storage.nbytes()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (count,), (1,))


def _host_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage if storage.device.type == "cpu" else _bytes_of(storage).cpu().untyped_storage()


def as_host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU in the memory of one of the device, for kernels that the host interprets."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    host = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return host.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def watched() -> Iterator[list[Wait]]:
    """Context manager: the list gets every wait inside, also those in other threads."""
    global _waits
    outer, _waits = _waits, []
    try:
        yield _waits
    finally:
        _waits = outer


_capturing = False


@contextmanager
def capturing() -> Iterator[None]:
    """Context manager: torch says that a CUDA graph is being captured. Nothing is replayed here."""
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False
