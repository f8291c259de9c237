"""What an autograd graph holds instead of a saved tensor that was offloaded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensor import QuantizedTensorStorage
from .errors import OffloadError
from .layout import Layout
from .store import Place


class Watch:
    """Detects writes to a tensor without keeping its memory: an empty alias that shares its version counter.

    This is needed because autograd does not check the versions of tensors that come from hooks.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._seen = version_of(tensor)

    def check(self, layout: Layout) -> None:
        check_version(self._counter, self._seen, layout.shape)


class Record:
    """The bytes of a tensor: in memory (``source``), in the store, or in both while they are being written.

    Args:
        releases: free the memory as soon as the bytes are written; otherwise on request.
    """

    def __init__(self, tensor: Tensor, source: Tensor, place: Place, index: int, releases: bool) -> None:
        self.source: Tensor | None = source
        self.nbytes, self.device = source.numel(), source.device
        # Copies run in a thread that has a stream of its own: they must wait for what has been queued on this one.
        on_gpu = self.device.type == "cuda"
        self._stream: Any = torch.accelerator.current_stream(self.device) if on_gpu else nullcontext()
        self.place, self.index, self.releases = place, index, releases
        self.watch = Watch(tensor)
        self.storage = StorageWeakRef(tensor.untyped_storage())  # its address is a key as long as this lives
        self.writing: Future[None] | None = None
        self.reading: Future[Tensor | None] | None = None
        self.failure: OffloadError | None = None

    def write(self) -> None:
        """Store the bytes; runs in the background thread."""
        source = self.source
        if source is None:
            return
        with self._stream:
            self.place.store.write(self.place, source.cpu())
        if self.releases:
            self.source = None

    def read(self) -> Tensor:
        """Read the bytes back; runs in the background thread."""
        with self._stream:
            return self.place.store.read(self.place, self.nbytes).to(self.device)


class Stored(NamedTuple):
    """A tensor whose bytes are in a record, which other views of the same bytes may share."""

    record: Record
    layout: Layout


class Kept(NamedTuple):
    """A tensor that stays in memory, detached: its history would be a reference cycle."""

    tensor: Tensor
    version: int | None


class Wrapped(NamedTuple):
    """A wrapper tensor subclass of another library; the tensors inside are packed."""

    kind: type[Any]
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Any, pack: Callable[[Tensor], Any]) -> Wrapped:
        names, context = tensor.__tensor_flatten__()
        parts = {name: pack(getattr(tensor, name)) for name in names}
        return Wrapped(type(tensor), parts, context, tensor.shape, tensor.stride())

    def together(self, unpack: Callable[[Any], Tensor]) -> Any:
        parts = {name: unpack(part) for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__(parts, self.context, self.shape, self.stride)


class Planes(NamedTuple):
    """A quantized tensor without its buffers, and the packed buffers in their order."""

    hollow: QuantizedTensorStorage
    parts: list[Any]

    @staticmethod
    def of(tensor: QuantizedTensorStorage, pack: Callable[[Tensor], Any]) -> Planes:
        parts: list[Any] = []

        def taken(buffer: Tensor) -> Tensor:
            parts.append(pack(buffer))
            return buffer.new_empty(()).expand(buffer.shape)  # a shape without memory

        return Planes(tensor._map_buffers(taken), parts)

    def together(self, unpack: Callable[[Any], Tensor]) -> Any:
        buffers = (unpack(part) for part in self.parts)
        return self.hollow._map_buffers(lambda _: next(buffers))


Packed = Stored | Kept | Wrapped | Planes


def records_of(packed: Packed) -> list[Record]:
    """All records inside ``packed``."""
    if isinstance(packed, (Wrapped, Planes)):
        parts = packed.parts.values() if isinstance(packed, Wrapped) else packed.parts
        return [record for part in parts for record in records_of(part)]
    return [packed.record] if isinstance(packed, Stored) else []


def version_of(tensor: Tensor) -> int | None:
    """The version of a tensor, which in-place writes increase; None for inference tensors, which have no version."""
    return None if tensor.is_inference() else tensor._version


def check_version(counter: Tensor, seen: int | None, shape: Any) -> None:
    """Raise as autograd does if a saved tensor was written to."""
    if seen is not None and counter._version != seen:
        raise RuntimeError(
            f"a tensor of shape {list(shape)} that was saved for backward has been modified by an inplace operation: "
            f"it is at version {counter._version} and was saved at version {seen}"
        )
