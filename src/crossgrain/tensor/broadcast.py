"""What torch.distributed may do with quantized tensors: broadcast them, as the bytes of their planes.

torch asks the tensor what to do in most collectives, and `dispatch` answers with what is here. For two functions that
do not ask there is a patch (`runtime.torch_patches.lists_of_tensors`), which is installed with the first quantized
tensor and uses `BroadcastHandler`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..planes.transport import kind_of
from .sharding import buffers_of, exchanged
from .tensor import QuantizedTensor


def refusal(name: str, tensor: QuantizedTensor) -> RuntimeError:
    return RuntimeError(
        f"{name} was called on a quantized tensor, a {type(tensor).__name__} of shape {list(tensor.shape)}. "
        "Communicate the buffers of get_data_tensors() and the scales instead: decoding and requantizing around a "
        "collective would leave ranks with different bytes."
    )


def broadcast_(func: Any, tensors: Sequence[QuantizedTensor], group: Any, *options: Any) -> tuple[Any, Any]:
    """``c10d.broadcast_``: complete when it returns, whether or not that was asked for."""
    _check_agreement(tensors, dist.ProcessGroup.unbox(group))
    buffers = _bytes_of(tensors)
    packed = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
    _, work = func([packed], group, *options)
    work.wait()
    pieces = packed.split([buffer.numel() * buffer.element_size() for buffer in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))  # cloned: a piece may begin anywhere
    _note_received(tensors)
    return tensors, work


def _check_agreement(tensors: Sequence[QuantizedTensor], group: Any) -> None:
    """All ranks raise unless all have the same planes, and may read them."""
    problem: Exception | None = None
    try:
        for tensor in tensors:
            tensor._check_fresh()
            _refuse_shared_scales(tensor)
    except RuntimeError as error:
        problem = error
    held = str(
        [
            (tuple(tensor.shape), type(tensor._get_quantizer()).__name__, [kind_of(plane) for plane in tensor.planes()])
            for tensor in tensors
        ]
    )
    mine = [problem is not None, zlib.crc32(held.encode())]
    found = exchanged(mine, group, dist.get_world_size(group), tensors[0].device)
    if problem is not None:
        raise problem
    if any(refused for refused, _ in found):
        raise RuntimeError(f"another rank refused to broadcast its {_names(tensors)}")
    if any(other != found[0][1] for _, other in found):
        raise RuntimeError(
            f"a broadcast of {_names(tensors)}: they hold different planes on different ranks; here {held}"
        )


def _refuse_shared_scales(tensor: QuantizedTensor) -> None:
    """A slice whose scale is that of a larger tensor, the rest of which would not be sent along."""
    for plane in tensor.planes():
        if plane.scale_across(tensor._cut_axes) is not None:
            tensor._refuse_slice_write(plane)


def _names(tensors: Sequence[QuantizedTensor]) -> str:
    first = f"{type(tensors[0]).__name__} of shape {list(tensors[0].shape)}"
    return first if len(tensors) == 1 else f"{len(tensors)} quantized tensors, first a {first}"


def _bytes_of(tensors: Sequence[QuantizedTensor]) -> list[Tensor]:
    """The buffers, and what will scale the next write, as dtypes that every backend can send."""
    quantizers = [own for tensor in tensors for own in tensor._get_quantizer().plain_quantizers()]
    buffers = [buffer.detach() for tensor in tensors for buffer in buffers_of(tensor)]
    buffers += [seen.detach() for quantizer in quantizers for seen in quantizer.statistics()]
    return [buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer for buffer in buffers]


def _note_received(tensors: Sequence[QuantizedTensor]) -> None:
    for tensor in tensors:
        tensor._mark_written()
        for mark in tensor._write_marks():
            mark.received = mark.number


class BroadcastHandler:
    """Quantized tensors in lists that torch broadcasts (`runtime.torch_patches.lists_of_tensors.ListHandler`)."""

    tensor_class = QuantizedTensor
    refusal = staticmethod(refusal)
    note_received = staticmethod(_note_received)

    @staticmethod
    def bytes_to_broadcast(tensors: Sequence[QuantizedTensor], group: Any) -> list[Tensor]:
        _check_agreement(tensors, group)
        return _bytes_of(tensors)
