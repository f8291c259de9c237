"""The saved-tensor hooks of offloading. A background thread writes tensors, and reads them ahead in backward."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..tensor import QuantizedTensorStorage
from .errors import OffloadError, OverLimitError
from .layout import Layout
from .record import Kept, Packed, Planes, Record, Stored, Wrapped, check_version, version_of
from .staying import stays_in_memory
from .store import Store


class Engine:
    """Moves saved tensors to a store and back.

    Args:
        store: where bytes go.
        min_bytes: smaller tensors stay in memory.
        prefetch: how many records are read ahead in backward.
        pending: how many tensors may wait to be written; packing another one waits for the first of them.
        keep_over_limit: keep a tensor in memory, instead of raising, when the store has no room for it.
    """

    def __init__(
        self, store: Store, *, min_bytes: int, prefetch: int, pending: int, keep_over_limit: bool = False
    ) -> None:
        self.store = store
        self.stored_bytes = self.kept_bytes = self.shared_bytes = 0  # of all tensors that were ever packed
        self._min_bytes, self._prefetch, self._pending = min_bytes, prefetch, pending
        self._keep_over_limit = keep_over_limit
        self._known: weakref.WeakValueDictionary[Any, Record] = weakref.WeakValueDictionary()
        self._in_order: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self._count = 0
        self._waiting: deque[Future[None]] = deque()
        self._failure: OffloadError | None = None
        self._lock = Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="crossgrain-offload")

    def hooks(self, pack: Callable[[Tensor], Packed] | None = None) -> saved_tensors_hooks:
        """The saved-tensor hooks to enter; ``pack`` replaces the function that packs a tensor."""
        both = (pack or self.pack, self.unpack)
        if "torch._dynamo" in sys.modules:  # which would trace hooks that a compiled function calls
            both = (torch.compiler.disable(both[0]), torch.compiler.disable(both[1]))
        return saved_tensors_hooks(*both)

    # ---- packing -------------------------------------------------------------------------------

    def pack(self, tensor: Tensor | QuantizedTensorStorage, *, now: bool = True) -> Packed:
        """Return what the graph holds instead of the tensor.

        With ``now=False`` nothing is written yet: `start` begins to write, and `release` frees the memory.
        """
        self.store.check_process()
        self.raise_failure()
        with torch.no_grad():
            return self._packed(tensor, now)

    def _packed(self, tensor: Any, now: bool) -> Packed:
        if stays_in_memory(tensor):
            return Kept(tensor.detach(), version_of(tensor))
        if isinstance(tensor, QuantizedTensorStorage):
            return Planes.of(tensor, lambda buffer: self._packed(buffer, now))
        if _is_wrapper(tensor):
            return Wrapped.of(tensor, lambda part: self._packed(part, now))
        if not _has_plain_bytes(tensor):
            return Kept(tensor.detach(), version_of(tensor))
        layout = Layout.of(tensor)
        if layout.nbytes < self._min_bytes:
            return self._kept(tensor, layout)
        return self._stored(tensor, layout, now)

    def _kept(self, tensor: Tensor, layout: Layout) -> Kept:
        self.kept_bytes += layout.nbytes
        return Kept(tensor.detach(), version_of(tensor))

    def _stored(self, tensor: Tensor, layout: Layout, now: bool) -> Packed:
        version = version_of(tensor)
        key = (*layout.where(tensor), version)
        known = None if version is None else self._known.get(key)
        if known is not None:
            self.shared_bytes += layout.nbytes
            return Stored(known, layout)
        try:
            place = self.store.reserve(layout.nbytes)
        except OverLimitError:
            if self._keep_over_limit:
                return self._kept(tensor, layout)
            raise
        with self._lock:
            self._count += 1
            record = Record(tensor, layout.bytes_of(tensor), place, self._count, releases=now)
            self._known[key] = self._in_order[record.index] = record
        self.stored_bytes += layout.nbytes
        if now:
            self.start([record])
        return Stored(record, layout)

    # ---- moving bytes --------------------------------------------------------------------------

    def start(self, records: Iterable[Record]) -> None:
        """Start writing these records in the background."""
        for record in records:
            if record.writing is not None:
                continue
            while len(self._waiting) >= self._pending:
                self._waiting.popleft().result()
            record.writing = self._worker.submit(_write, weakref.ref(record), weakref.ref(self))
            self._waiting.append(record.writing)

    def release(self, records: Iterable[Record]) -> None:
        """Wait until these records are written, and free their memory."""
        for record in records:
            if record.writing is not None:
                record.writing.result()
                self._check(record)
                record.source = None

    def start_reading(self, record: Record) -> None:
        """Start reading a record in the background, unless its bytes are still in memory."""
        with self._lock:
            if record.source is None and record.reading is None:
                record.reading = self._worker.submit(_read, weakref.ref(record))

    def wait(self) -> None:
        """Wait until everything is written; raise `OffloadError` if a write failed."""
        self._waiting.clear()
        self._worker.submit(int).result()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise an error of the background thread in this thread, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise _afresh(failure)

    # ---- unpacking -----------------------------------------------------------------------------

    def unpack(self, packed: Packed) -> Any:
        """Return the tensor. May be called any number of times."""
        with torch.no_grad():
            return self._unpacked(packed)

    def _unpacked(self, packed: Packed) -> Any:
        if isinstance(packed, (Planes, Wrapped)):
            return packed.together(self._unpacked)
        if isinstance(packed, Kept):
            check_version(packed.tensor, packed.version, packed.tensor.shape)
            return packed.tensor
        self._check(packed.record)
        packed.record.watch.check(packed.layout)
        return packed.layout.tensor_of(self._bytes(packed.record))

    def _bytes(self, record: Record) -> Tensor:
        self.store.check_process()
        source = record.source
        if source is None:
            self.start_reading(record)
        with self._lock:
            reading, record.reading = record.reading, None
            ahead = [self._in_order.get(record.index - step) for step in range(1, self._prefetch + 1)]
        for other in ahead:
            if other is not None:
                self.start_reading(other)
        if source is not None:
            return source
        read = None if reading is None else reading.result()
        return record.read() if read is None else read  # None: another thread was faster

    def _check(self, record: Record) -> None:
        if record.failure is not None:
            self._failure = None
            raise _afresh(record.failure)


def _write(record_reference: weakref.ref[Record], engine_reference: weakref.ref[Engine]) -> None:
    """Write a record; runs in the background thread. A record whose graph is gone is not written."""
    record = record_reference()
    if record is None:
        return
    try:
        with torch.no_grad():
            record.write()
    except Exception as error:
        failure = (
            error
            if isinstance(error, OffloadError)
            else OffloadError(f"a tensor of {record.nbytes} bytes could not be stored: {error!r}")
        )
        for one in (error, error.__cause__):
            if one is not None:
                one.__traceback__ = None  # its frames hold the record
        record.failure = failure
        engine = engine_reference()
        if engine is not None:
            engine._failure = failure


def _afresh(failure: OffloadError) -> OffloadError:
    """A copy of the error without its traceback, whose frames would keep tensors alive."""
    new = OffloadError(*failure.args)
    new.__cause__ = failure.__cause__
    return new


def _read(record_reference: weakref.ref[Record]) -> Tensor | None:
    """Read a record; runs in the background thread."""
    record = record_reference()
    return None if record is None else record.read()


def _is_wrapper(tensor: Any) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def _has_plain_bytes(tensor: Tensor) -> bool:
    """Whether the tensor is an ordinary non-empty strided tensor whose bytes in memory are its values."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
