"""Collectives of torch.distributed on quantized tensors: only broadcasts are supported, of the bytes of all planes.

torch calls the tensor's dispatch for most collectives, and `dispatch` calls this module. Two functions of torch do not;
`runtime.torch_patches.lists_of_tensors` patches them when the first quantized tensor is created, and uses
`BroadcastHandler`.
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
    """The error for a collective that is not supported."""
    return RuntimeError(
        f"{name} was called on a quantized tensor, a {type(tensor).__name__} of shape {list(tensor.shape)}, which only "
        "supports broadcasts. Communicate the buffers of get_data_tensors() and the scales instead: decoding before "
        "and requantizing after a collective would leave ranks with different bytes."
    )


def broadcast_(func: Any, tensors: Sequence[QuantizedTensor], group: Any, *options: Any) -> tuple[Any, Any]:
    """``c10d.broadcast_`` for quantized tensors. It is complete when it returns, even if called asynchronously."""
    _check_agreement(tensors, dist.ProcessGroup.unbox(group))
    buffers = _bytes_of(tensors)
    packed = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
    _, work = func([packed], group, *options)
    work.wait()
    pieces = packed.split([buffer.numel() * buffer.element_size() for buffer in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))  # cloned, because a piece may not be aligned
    _note_received(tensors)
    return tensors, work


def _check_agreement(tensors: Sequence[QuantizedTensor], group: Any) -> None:
    """Raise on all ranks if their tensors have different planes, or if one rank cannot read or write its tensor."""
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
        raise RuntimeError(f"another rank cannot broadcast its {_names(tensors)}; see the error of that rank")
    if any(other != found[0][1] for _, other in found):
        raise RuntimeError(
            f"cannot broadcast {_names(tensors)}: different ranks have different planes; this rank has {held}"
        )


def _refuse_shared_scales(tensor: QuantizedTensor) -> None:
    """Raise for a slice that shares the scale of a larger tensor: the rest of that tensor would not be sent."""
    for plane in tensor.planes():
        if plane.scale_across(tensor._cut_axes) is not None:
            tensor._refuse_slice_write(plane)


def _names(tensors: Sequence[QuantizedTensor]) -> str:
    first = f"{type(tensors[0]).__name__} of shape {list(tensors[0].shape)}"
    return first if len(tensors) == 1 else f"{len(tensors)} quantized tensors, first a {first}"


def _bytes_of(tensors: Sequence[QuantizedTensor]) -> list[Tensor]:
    """The buffers, and the statistics from which the next scale follows, in dtypes that every backend can send."""
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
    """How torch broadcasts lists with quantized tensors (see `runtime.torch_patches.lists_of_tensors.ListHandler`)."""

    tensor_class = QuantizedTensor
    refusal = staticmethod(refusal)
    note_received = staticmethod(_note_received)

    @staticmethod
    def bytes_to_broadcast(tensors: Sequence[QuantizedTensor], group: Any) -> list[Tensor]:
        """The buffers to broadcast, after a check that all ranks have the same planes."""
        _check_agreement(tensors, group)
        return _bytes_of(tensors)
