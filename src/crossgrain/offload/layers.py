"""Offloading layer by layer, under the names of Transformer Engine.

Copies are made by a thread: streams are taken and not used, and reading ahead is what double buffering is there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..tensor import QuantizedTensorStorage
from .engine import Engine
from .record import Packed, Record, records_of
from .store import HostStore

MIN_BYTES = 1 << 16
_ALL_AT_ONCE = 1 << 30  # a layer is written as a whole
_MIB = 2**20


def start_offload(*tensors: Tensor, offload_base_tensor: bool = False) -> None:
    """Say that these tensors have their values. They have them as soon as they exist here: there is no stream."""
    for tensor in tensors:
        if not isinstance(tensor, (Tensor, QuantizedTensorStorage)):
            raise TypeError(f"start_offload takes tensors, not {type(tensor).__name__}")


def _engine(retain: bool, pending: int, min_bytes: int = MIN_BYTES) -> Engine:
    return Engine(HostStore(retain=retain), min_bytes=min_bytes, prefetch=4, pending=pending)


class OffloadableLayerState:
    """The tensors of one layer: pushed, written, let go, read again and popped, when the caller says so.

    Without `start_offload`, or before memory is let go, tensors are popped from memory. ``min_bytes``: smaller
    ones are always kept there.
    """

    def __init__(
        self, offload_stream: Any = None, retain_pinned_cpu_buffers: bool = False, *, min_bytes: int = MIN_BYTES
    ) -> None:
        self._engine = _engine(retain_pinned_cpu_buffers, _ALL_AT_ONCE, min_bytes)
        self._pushed: list[Packed] = []

    def push_tensor(self, tensor: Tensor | QuantizedTensorStorage) -> int:
        """A number to pop the tensor by. The tensor itself is left as it is."""
        if not isinstance(tensor, (Tensor, QuantizedTensorStorage)):
            raise TypeError(f"push_tensor takes tensors, not {type(tensor).__name__}")
        self._pushed.append(self._engine.pack(tensor, now=False))
        return len(self._pushed) - 1

    def start_offload(self) -> None:
        """Begin to write all that was pushed."""
        self._engine.start(self._records())

    def release_activation_forward_gpu_memory(self) -> None:
        """Let go of the memory of what was written."""
        self._engine.release(self._records())

    def start_reload(self) -> None:
        """Begin to read all of it, the last first."""
        for record in reversed(self._records()):
            self._engine.start_reading(record)

    def pop_tensor(self, number: int) -> Any:
        """The tensor, as it was pushed."""
        return self._engine.unpack(self._pushed[number])

    def release_all_memory(self) -> None:
        """Forget all tensors."""
        self._pushed.clear()

    def get_offloaded_total_size_mb(self) -> float:
        """MiB in the store."""
        return sum(record.nbytes for record in self._records() if record.writing is not None) / _MIB

    def _records(self) -> list[Record]:
        found = {id(record): record for packed in self._pushed for record in records_of(packed)}
        return list(found.values())


class DefaultOffloadSynchronizer:
    """A context for each layer of ``model_layers``; the first ``num_layers`` are offloaded, backward needs them last.

    >>> context, synchronize = get_cpu_offload_context(enabled=True, num_layers=2, model_layers=3)
    >>> for layer in layers:
    ...     with context:
    ...         x = layer(x)
    ...     x = synchronize(x)
    """

    def __init__(self, num_layers: int, model_layers: int, retain_pinned_cpu_buffers: bool = False) -> None:
        if not 0 <= num_layers <= model_layers:
            raise ValueError(f"num_layers is between 0 and model_layers, {model_layers}, not {num_layers}")
        self.num_layers, self.model_layers = num_layers, model_layers
        self._layer = 0
        self._entered: saved_tensors_hooks | None = None
        self._engine = self._make_engine(retain_pinned_cpu_buffers)

    def _make_engine(self, retain: bool) -> Engine:
        return _engine(retain, pending=4)

    def _pack(self, tensor: Tensor) -> Packed:
        return self._engine.pack(tensor)

    def _offloads(self) -> bool:
        return self._layer < self.num_layers

    def __enter__(self) -> None:
        if self._entered is not None:
            raise RuntimeError("the offload context of a layer is entered already")
        if self._offloads():
            self._entered = self._engine.hooks(self._pack)
            self._entered.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(kind, error, traceback)
        if kind is not None:
            self._layer = 0  # the next forward begins anew
        else:
            self._engine.raise_failure()

    def synchronize(self, tensor: Tensor) -> Tensor:
        """The end of a layer."""
        self._layer = (self._layer + 1) % self.model_layers
        return tensor


class ManualOffloadSynchronizer(DefaultOffloadSynchronizer):
    """The caller says when a layer is written, let go and read again, by its number."""

    def __init__(self, num_layers: int, model_layers: int, retain_pinned_cpu_buffers: bool = False) -> None:
        super().__init__(num_layers, model_layers, retain_pinned_cpu_buffers)
        self._records: list[list[weakref.ref[Record]]] = [[] for _ in range(model_layers)]

    def _make_engine(self, retain: bool) -> Engine:
        return _engine(retain, pending=_ALL_AT_ONCE)

    def _offloads(self) -> bool:
        return True

    def __enter__(self) -> None:
        super().__enter__()
        alive = [reference for reference in self._records[self._layer] if reference() is not None]
        self._records[self._layer] = alive  # an earlier forward may still wait for its backward

    def _pack(self, tensor: Tensor) -> Packed:
        packed = self._engine.pack(tensor, now=False)
        self._records[self._layer] += map(weakref.ref, records_of(packed))
        return packed

    def start_offload_layer(self, layer_id: int) -> None:
        """Begin to write what the layer saved."""
        self._engine.start(self._of(layer_id))

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Let go of the memory of what was written."""
        self._engine.release(self._of(layer_id))

    def start_reload_layer(self, layer_id: int) -> None:
        """Begin to read it again, the last first."""
        for record in reversed(self._of(layer_id)):
            self._engine.start_reading(record)

    def _of(self, layer_id: int) -> list[Record]:
        if not 0 <= layer_id < self.model_layers:
            raise ValueError(f"there are {self.model_layers} layers, and no layer {layer_id}")
        return [record for reference in self._records[layer_id] if (record := reference()) is not None]


Synchronize = Callable[[Tensor], Tensor]


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> (
    tuple[AbstractContextManager[None], Synchronize]
    | tuple[AbstractContextManager[None], Synchronize, ManualOffloadSynchronizer | None]
):
    """A context for the forward of each layer, and a function to call on each layer's output.

    With ``manual_synchronization`` also the synchronizer by which the caller moves layers, None if not ``enabled``.
    """
    if not enabled:
        return (nullcontext(), _unchanged, None) if manual_synchronization else (nullcontext(), _unchanged)
    if not offload_activations:
        raise ValueError("get_cpu_offload_context offloads activations: offload_activations has to be True")
    if offload_weights:
        warnings.warn("offload_weights has no effect: modules hold their weights", DeprecationWarning, stacklevel=2)
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(num_layers, model_layers, retain_pinned_cpu_buffers)
        return manual, manual.synchronize, manual
    synchronizer = DefaultOffloadSynchronizer(num_layers, model_layers, retain_pinned_cpu_buffers)
    return synchronizer, synchronizer.synchronize


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
