"""What each torch operation does with a quantized tensor.

Operations on bytes (views, copies, allocation) have handlers in this module. All other operations decode their
arguments and run in high precision; quantized tensors that they write to are then requantized, in all planes that they
have. Collectives are never run like that, because ranks would end up with different bytes (see `broadcast`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..formats.dtypes import HIGH_PRECISION
from ..planes import CutsBlocks, shape_problem
from ..runtime.strict import refuse_if_strict
from ..runtime.torch_patches.checkpoint_loads import is_loading
from ..runtime.torch_patches.shards import is_cutting_shards
from .decoded_view import decoded_view
from .holder import resolved_shape
from .vanishing import is_update, rounds_updates, warn_if_vanished

if TYPE_CHECKING:
    from .tensor import QuantizedTensor

aten = torch.ops.aten

Handler = Callable[..., Any]
_HANDLERS: dict[Any, Handler] = {}

_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on arguments of which some are quantized tensors."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        try:
            return handler(func, *args, **kwargs)
        except CutsBlocks as error:
            return _decoded_piece(func, args, kwargs, error)
    if func.namespace in _COLLECTIVES:
        return _communicate(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(f"{func} would change the shape of a quantized tensor in place, which is not supported")
    if func._schema.is_mutable:
        return _run_mutating(func, args, kwargs)
    result = func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))
    if any(returned.alias_info is not None for returned in func._schema.returns):
        why = f"{func.overloadpacket.__name__} picks single numbers out of blocks, which have a scale together"
        return tree_map(lambda value: decoded_view(value, why), result)
    return result


def _decoded_piece(func: Any, args: Sequence[Any], kwargs: dict[str, Any], error: CutsBlocks) -> Any:
    """The decoded, read-only numbers of a piece that no planes can represent."""
    tensor, *rest = args
    splits = func in (aten.split.Tensor, aten.split_with_sizes.default)
    dim = int(rest[1] if len(rest) > 1 else kwargs.get("dim", 0)) % max(tensor.dim(), 1) if splits else 0
    if splits and dim == 0 and tensor._strict_refuses_cuts:
        refuse_if_strict("pieces that cut blocks of a hybrid", str(error))
    if is_cutting_shards():
        raise ValueError(str(error)) from None
    decoded = _decoded(tensor)
    if func is aten.as_strided.default:
        if any(cut for cut, _, _ in tensor._cuts):
            raise ValueError(str(error)) from None  # its strides are not those of the memory that it was cut from
        decoded = decoded.clone(memory_format=torch.contiguous_format)
        size, stride, *given = rest
        offset = given[0] if given else kwargs.get("storage_offset")
        rest, kwargs = [size, stride, 0 if offset is None else int(offset) - tensor._begins_at], {}
    return tree_map(lambda value: decoded_view(value, str(error)), func(decoded, *rest, **kwargs))


def _communicate(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from . import broadcast

    quantized = [value for value in tree_leaves((args, kwargs)) if _is_quantized(value)]
    if func is torch.ops.c10d.broadcast_.default and len(quantized) == len(args[0]):
        return broadcast.broadcast_(func, *args, **kwargs)
    raise broadcast.refusal(str(func), quantized[0])


def _is_quantized(value: Any) -> bool:
    from .tensor import QuantizedTensor

    return isinstance(value, QuantizedTensor)


def _decoded(value: Any) -> Any:
    return value._decoded(value.dtype, None) if _is_quantized(value) else value


def _run_mutating(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Decode, run, and requantize what was written: each quantized tensor once, even if it is passed several times."""
    plain: dict[int, Tensor] = {}
    owner: dict[int, QuantizedTensor] = {}
    written: dict[int, QuantizedTensor] = {}

    def decode_once(value: Any) -> Any:
        if not _is_quantized(value):
            return value
        if id(value) not in plain:
            decoded = _decoded(value)
            if any(decoded.data_ptr() == buffer.data_ptr() for _, buffer in value._buffers()):
                decoded = decoded.clone()  # nothing may change before it is known that everything can be written back
            plain[id(value)] = decoded
            owner[id(decoded)] = value
        return plain[id(value)]

    def note_written(value: Any) -> Any:
        if _is_quantized(value):
            written[id(value)] = value
        return value

    for argument, value in _with_schema(func, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            tree_map(note_written, value)
    for tensor in written.values():
        tensor._get_quantizer().check_writable(tensor)
    watched = [tensor for tensor in written.values() if rounds_updates(tensor)] if is_update(func) else []
    before = [decode_once(tensor).clone() for tensor in watched]
    result = func(*tree_map(decode_once, args), **tree_map(decode_once, kwargs))
    for key, tensor in written.items():
        if plain[key].shape != tensor.shape:
            raise RuntimeError(
                f"{func} would change the shape of a {type(tensor).__name__} in place, from "
                f"{list(tensor.shape)} to {list(plain[key].shape)}, which is not supported"
            )
    for key, tensor in written.items():
        tensor.quantize_(plain[key])
    for tensor, values in zip(watched, before, strict=True):
        warn_if_vanished(tensor, values)
    return tree_map(lambda value: owner.get(id(value), value), result)


def _with_schema(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    arguments = func._schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    return [*zip(arguments, args, strict=False), *((by_name[name], value) for name, value in kwargs.items())]


def _handles(*funcs: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for func in funcs:
            _HANDLERS[func] = handler
        return handler

    return register


def _handles_view(*funcs: Any) -> Callable[[Handler], Handler]:
    """Register a handler that returns views of the buffers.

    Such views must share the version counters of the buffers, which torch does not do inside a dispatch. Otherwise
    autograd would not notice that a write through the view has changed a tensor that was saved for backward.
    """

    def register(handler: Handler) -> Handler:
        @functools.wraps(handler)
        def sharing_versions(*args: Any, **kwargs: Any) -> Any:
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                return handler(*args, **kwargs)

        return _handles(*funcs)(sharing_versions)

    return register


# ---- views -------------------------------------------------------------------------------------------


@_handles(aten.detach.default, aten.alias.default)
def _detach(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    return _knowing_cuts(tensor._rewrap(), tensor)


@_handles_view(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(func: Any, tensor: QuantizedTensor, shape: Sequence[int], *_: Any) -> QuantizedTensor:
    return _knowing_cuts(tensor._viewed(resolved_shape(tensor.shape, shape)), tensor)


def _cut(tensor: QuantizedTensor, dim: int, start: int, stop: int) -> QuantizedTensor:
    new = _knowing_cuts(tensor._sliced(dim, start, stop), tensor, (dim, start, stop))
    new._begins_at = tensor._begins_at + start * math.prod(tensor.shape[dim + 1 :])
    return new


def _knowing_cuts(new: QuantizedTensor, tensor: QuantizedTensor, *cuts: tuple[int, int, int]) -> QuantizedTensor:
    if tensor._is_param or tensor._of_param:
        new._of_param = True
    if tensor._cuts or cuts:
        new._cuts = (*tensor._cuts, *cuts)
        new._begins_at = tensor._begins_at
    return new


@_handles_view(aten.slice.Tensor)
def _slice(
    func: Any,
    tensor: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> QuantizedTensor:
    dim = dim % tensor.dim()
    first, last, _ = slice(start, stop).indices(tensor.shape[dim])
    if step != 1:
        raise CutsBlocks(f"a slice of a {type(tensor).__name__} with step {step} takes single numbers out of blocks")
    return _cut(tensor, dim, first, max(first, last))


@_handles_view(aten.split.Tensor)
def _split(func: Any, tensor: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    dim = dim % tensor.dim()
    total = tensor.shape[dim]
    if size <= 0 < total:
        raise ValueError(f"the size of the pieces of a split must be positive, got {size} for dimension {dim}")
    starts = range(0, total, size) if total else range(1)
    return [_cut(tensor, dim, start, min(start + size, total)) for start in starts]


@_handles_view(aten.split_with_sizes.default)
def _split_with_sizes(func: Any, tensor: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    dim = dim % tensor.dim()
    if sum(sizes) != tensor.shape[dim]:
        raise ValueError(f"split sizes {list(sizes)} do not add up to {tensor.shape[dim]}, the size of dimension {dim}")
    ends = itertools.accumulate(sizes)
    return [_cut(tensor, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@_handles_view(aten.as_strided.default)
def _as_strided(
    func: Any, tensor: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QuantizedTensor:
    return tensor._strided(size, stride, None if offset is None else int(offset))


# ---- copies ------------------------------------------------------------------------------------------


@_handles(aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return tensor._clone()


@_handles(aten._to_copy.default)
def _to_copy(
    func: Any,
    tensor: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    pin_memory: bool | None = None,
    **_: Any,
) -> Tensor:
    """Copy. Bytes are kept for another device and for another nominal dtype; other dtypes get decoded numbers."""
    if dtype is not None and dtype not in HIGH_PRECISION:
        return tensor.dequantize().to(dtype=dtype, device=device, copy=True)
    from .init_values import hand_on_init_value

    clone = tensor._clone()
    moved = clone._map_buffers(lambda buffer: buffer.to(device=device, non_blocking=non_blocking), dtype=dtype)
    moved = moved._map_buffers(Tensor.pin_memory) if pin_memory else moved
    if moved.device != tensor.device:
        hand_on_init_value(tensor, moved)
    return moved


@_handles(aten.copy_.default)
def _copy_(func: Any, dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    from .init_values import hand_on_init_value
    from .loading import check_formats, rounded_again
    from .tensor import QuantizedTensor

    if not isinstance(dst, QuantizedTensor):
        assert isinstance(src, QuantizedTensor)
        return dst.copy_(src.dequantize(), non_blocking=non_blocking)
    if isinstance(src, QuantizedTensor) and is_loading() and rounded_again(dst, src) is not None:
        check_formats({"a tensor of the state dict": dst}, {"a tensor of the state dict": src})
    if isinstance(src, QuantizedTensor) and src.shape == dst.shape and dst._copy_bytes_from(src):
        hand_on_init_value(src, dst)
        return dst
    plain = src.dequantize() if isinstance(src, QuantizedTensor) else src
    plain = plain if plain.dtype in HIGH_PRECISION else plain.to(dst.dtype)
    dst.quantize_(plain.expand(dst.shape).to(dst.device))
    return dst


@_handles(aten._foreach_copy_.default)
def _foreach_copy_(func: Any, dsts: Sequence[Tensor], srcs: Sequence[Tensor], non_blocking: bool = False) -> None:
    for dst, src in zip(dsts, srcs, strict=True):
        dst.copy_(src, non_blocking=non_blocking)


@_handles(aten._pin_memory.default)
def _pin_memory(func: Any, tensor: QuantizedTensor, *_: Any) -> QuantizedTensor:
    return tensor._map_buffers(Tensor.pin_memory)


@_handles(aten.is_pinned.default)
def _is_pinned(func: Any, tensor: QuantizedTensor, *_: Any, **__: Any) -> bool:
    return all(buffer.is_pinned() for _, buffer in tensor._buffers())


# ---- allocation --------------------------------------------------------------------------------------


@_handles(aten.empty_like.default)
def _empty_like(func: Any, tensor: QuantizedTensor, **options: Any) -> Tensor:
    return _allocated(tensor, None, options)


@_handles(aten.new_empty.default)
def _new_empty(func: Any, tensor: QuantizedTensor, shape: Sequence[int], **options: Any) -> Tensor:
    return _allocated(tensor, shape, options)


@_handles(aten.new_zeros.default)
def _new_zeros(func: Any, tensor: QuantizedTensor, shape: Sequence[int], **options: Any) -> Tensor:
    """A tensor of zeros, with the per-tensor scale of ``tensor``, so that bytes of its parts can be copied into it."""
    new = _allocated(tensor, shape, options)
    if not _is_quantized(new):
        return new.zero_()
    for mine, theirs in zip(new.planes(), tensor.planes(), strict=True):  # type: ignore[attr-defined]
        for buffer in mine.buffers():
            buffer.zero_()  # scales too: what was in memory may be NaN
        scale, known = mine.scale_across((0, 1)), theirs.scale_across((0, 1))
        if scale is not None and known is not None and scale.shape == known.shape:
            scale.copy_(known)
    new._note_zeros()  # type: ignore[attr-defined]
    return new


def _allocated(tensor: QuantizedTensor, shape: Sequence[int] | None, options: dict[str, Any]) -> Tensor:
    """An uninitialised tensor like ``tensor``, of the same shape or another."""
    dtype, device = options.get("dtype"), options.get("device")
    device = tensor.device if device is None else torch.device(device)
    if dtype is not None and dtype not in HIGH_PRECISION:
        return torch.empty(tensor.shape if shape is None else shape, dtype=dtype, device=device)
    if shape is None:
        return tensor._empty_like(None, dtype, device)
    for plane in tensor.planes():
        problem = shape_problem(plane.format, plane.direction, shape)
        if problem:
            raise ValueError(
                f"{type(tensor).__name__}: a tensor of shape {list(shape)} cannot have a {plane.direction.value} plane "
                f"in the format {plane.format.name}: {problem}"
            )
    return tensor._empty_like(shape, dtype, device)


@_handles(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
)
def _plain_like(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """A plain tensor with the same shape, dtype and device: optimizer states and noise are in high precision."""
    like: Tensor = func(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    return like
