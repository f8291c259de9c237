"""Offload layer by layer, with the names and arguments of Transformer Engine.

Copies are made by a background thread. CUDA streams are accepted as arguments and ignored. Reading ahead is always on;
it does what double buffering does in Transformer Engine.
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
    """Declare that these tensors are computed. Accepted for compatibility: here nothing has to wait for a stream.

    Raises:
        TypeError: an argument is not a tensor.

    Examples:
        >>> from crossgrain.compat import cpu_offload
        >>> cpu_offload.start_offload(torch.ones(2))
    """
    for tensor in tensors:
        if not isinstance(tensor, (Tensor, QuantizedTensorStorage)):
            raise TypeError(f"start_offload takes tensors, got {type(tensor).__name__}")


def _engine(retain: bool, pending: int, min_bytes: int = MIN_BYTES) -> Engine:
    return Engine(HostStore(retain=retain), min_bytes=min_bytes, prefetch=4, pending=pending)


class OffloadableLayerState:
    """Offloads the tensors of one layer, step by step, when the caller asks for it.

    The steps are `push_tensor`, `start_offload`, `release_activation_forward_gpu_memory`, `start_reload`, `pop_tensor`.
    A tensor that was not written, or whose memory was not freed yet, is popped from memory.

    Args:
        offload_stream: accepted and ignored.
        retain_pinned_cpu_buffers: keep host buffers and reuse them.
        min_bytes: smaller tensors always stay in memory.

    Examples:
        >>> from crossgrain.compat.cpu_offload import OffloadableLayerState
        >>> state, activation = OffloadableLayerState(min_bytes=0), torch.ones(2)
        >>> number = state.push_tensor(activation)
        >>> state.start_offload()
        >>> state.release_activation_forward_gpu_memory()
        >>> state.start_reload()
        >>> state.pop_tensor(number)
        tensor([1., 1.])
    """

    def __init__(
        self, offload_stream: Any = None, retain_pinned_cpu_buffers: bool = False, *, min_bytes: int = MIN_BYTES
    ) -> None:
        self._engine = _engine(retain_pinned_cpu_buffers, _ALL_AT_ONCE, min_bytes)
        self._pushed: list[Packed] = []

    def push_tensor(self, tensor: Tensor | QuantizedTensorStorage) -> int:
        """Add a tensor, and return the number to pass to `pop_tensor`. The tensor itself is not changed."""
        if not isinstance(tensor, (Tensor, QuantizedTensorStorage)):
            raise TypeError(f"push_tensor takes tensors, got {type(tensor).__name__}")
        self._pushed.append(self._engine.pack(tensor, now=False))
        return len(self._pushed) - 1

    def start_offload(self) -> None:
        """Start writing all pushed tensors in the background."""
        self._engine.start(self._records())

    def release_activation_forward_gpu_memory(self) -> None:
        """Wait until the tensors are written, and free their memory."""
        self._engine.release(self._records())

    def start_reload(self) -> None:
        """Start reading all tensors back, the last one first."""
        for record in reversed(self._records()):
            self._engine.start_reading(record)

    def pop_tensor(self, tensor_or_tensor_id: Any) -> Any:
        """Return the tensor that was pushed under this number; a tensor that was not offloaded is returned itself."""
        if isinstance(tensor_or_tensor_id, Tensor):
            return tensor_or_tensor_id
        return self._engine.unpack(self._pushed[tensor_or_tensor_id])

    def release_all_memory(self) -> None:
        """Drop all pushed tensors."""
        self._pushed.clear()

    def get_offloaded_total_size_mb(self) -> float:
        """Size of the tensors that are written or being written, in MiB."""
        return sum(record.nbytes for record in self._records() if record.writing is not None) / _MIB

    def _records(self) -> list[Record]:
        found = {id(record): record for packed in self._pushed for record in records_of(packed)}
        return list(found.values())


class DefaultOffloadSynchronizer:
    """A context manager to enter for each layer. The first ``num_layers`` of ``model_layers`` layers are offloaded.

    The first layers are chosen because backward needs them last.

    Examples:
        >>> layers, x = [torch.nn.Linear(32, 32) for _ in range(3)], torch.ones(4, 32)
        >>> context, synchronize = cg.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=3)
        >>> for layer in layers:
        ...     with context:
        ...         x = layer(x)
        ...     x = synchronize(x)
        >>> x.sum().backward()
    """

    def __init__(self, num_layers: int, model_layers: int, retain_pinned_cpu_buffers: bool = False) -> None:
        if not 0 <= num_layers <= model_layers:
            raise ValueError(f"num_layers must be between 0 and model_layers = {model_layers}, got {num_layers}")
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
            raise RuntimeError(
                "the offload context is already entered: leave it after each layer, before entering it for the next one"
            )
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
        """Call this on the output of each layer: it ends the layer and returns ``tensor`` unchanged."""
        self._layer = (self._layer + 1) % self.model_layers
        return tensor


class ManualOffloadSynchronizer(DefaultOffloadSynchronizer):
    """Like `DefaultOffloadSynchronizer`, but the caller decides when a layer, given by its number, is moved.

    Examples:
        >>> context, synchronize, manual = cg.get_cpu_offload_context(
        ...     enabled=True, num_layers=1, model_layers=2, manual_synchronization=True
        ... )
        >>> type(manual)
        <class 'crossgrain.offload.layers.ManualOffloadSynchronizer'>
    """

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
        """Start writing what the layer saved."""
        self._engine.start(self._of(layer_id))

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Wait until the tensors are written, and free their memory."""
        self._engine.release(self._of(layer_id))

    def start_reload_layer(self, layer_id: int) -> None:
        """Start reading the tensors of the layer back, the last one first."""
        for record in reversed(self._of(layer_id)):
            self._engine.start_reading(record)

    def _of(self, layer_id: int) -> list[Record]:
        if not 0 <= layer_id < self.model_layers:
            raise ValueError(f"layer_id must be between 0 and {self.model_layers - 1}, got {layer_id}")
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
    """Create a context for the forward pass of each layer, and a function to call on the output of each layer.

    Args:
        enabled: if False, the context and the function do nothing.
        num_layers: how many layers to offload, counted from the first.
        model_layers: how many layers the model has.
        offload_activations: must be True.
        offload_weights: deprecated, no effect.
        double_buffering: accepted and ignored; tensors are always read ahead.
        manual_synchronization: return a `ManualOffloadSynchronizer` as well, with which the caller moves layers.
        retain_pinned_cpu_buffers: keep host buffers and reuse them.
        offload_stream: accepted and ignored.

    Returns:
        ``(context, synchronize)``, or with ``manual_synchronization`` ``(context, synchronize, synchronizer)``, where
        the synchronizer is None if not ``enabled``.

    Raises:
        ValueError: ``offload_activations`` is False, or ``num_layers`` is not between 0 and ``model_layers``.

    Examples:
        >>> layers = [torch.nn.Linear(32, 32) for _ in range(2)]
        >>> context, synchronize = cg.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
        >>> x = torch.ones(4, 32)
        >>> for layer in layers:
        ...     with context:
        ...         x = layer(x)
        ...     x = synchronize(x)
        >>> x.sum().backward()
    """
    if not enabled:
        return (nullcontext(), _unchanged, None) if manual_synchronization else (nullcontext(), _unchanged)
    if not offload_activations:
        raise ValueError("get_cpu_offload_context can only offload activations: offload_activations must be True")
    if offload_weights:
        warnings.warn(
            "offload_weights has no effect: weights stay in memory because their modules hold them",
            DeprecationWarning,
            stacklevel=2,
        )
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(num_layers, model_layers, retain_pinned_cpu_buffers)
        return manual, manual.synchronize, manual
    synchronizer = DefaultOffloadSynchronizer(num_layers, model_layers, retain_pinned_cpu_buffers)
    return synchronizer, synchronizer.synchronize


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
