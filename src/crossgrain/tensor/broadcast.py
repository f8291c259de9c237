"""What torch.distributed may do with quantized tensors: broadcast them, as the bytes of their planes.

torch mostly asks the tensor, and `dispatch` answers. Two of its functions do not ask: the broadcast that
DistributedDataParallel begins with concatenates decoded numbers and would requantize them, columns from rows; and
lists of tensors (scatter, gather, ...) are read from memory that a quantized tensor does not have. Both are replaced
here by functions that treat all other tensors as before.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..planes.transport import kind_of
from .sharding import buffers_of, exchanged, plain_quantizers
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


def _broadcast_coalesced(group: Any, tensors: list[Tensor], buffer_size: int, src: int = 0) -> None:
    quantized = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    if not quantized:
        _torch_broadcast_coalesced(group, tensors, buffer_size, src)
        return
    _check_agreement(quantized, group)
    others = [tensor for tensor in tensors if not isinstance(tensor, QuantizedTensor)]
    _torch_broadcast_coalesced(group, [*others, *_bytes_of(quantized)], buffer_size, src)
    _note_received(quantized)


def _check_tensor_list(param: Any, param_name: str) -> None:
    _torch_check_tensor_list(param, param_name)
    for tensor in param:
        if isinstance(tensor, QuantizedTensor):
            raise refusal(f"a collective with the list {param_name}", tensor)


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
    quantizers = [own for tensor in tensors for own in plain_quantizers(tensor._get_quantizer())]
    buffers = [buffer.detach() for tensor in tensors for buffer in buffers_of(tensor)]
    buffers += [seen.detach() for quantizer in quantizers for seen in quantizer._statistics()]
    return [buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer for buffer in buffers]


def _note_received(tensors: Sequence[QuantizedTensor]) -> None:
    for tensor in tensors:
        tensor._mark_written()
        for mark in tensor._write_marks():
            mark.received = mark.number


if dist.is_available():
    from torch.distributed import distributed_c10d
    from torch.distributed.distributed_c10d import _check_tensor_list as _torch_check_tensor_list

    _torch_broadcast_coalesced = torch._C._distributed_c10d._broadcast_coalesced


def teach_torch() -> None:
    """Put the functions above in the place of torch's."""
    if dist.is_available():
        dist._broadcast_coalesced = _broadcast_coalesced  # type: ignore[assignment, attr-defined]
        distributed_c10d._check_tensor_list = _check_tensor_list
