"""The identity format: planes that keep the numbers as they are, so that high precision is a format like others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..formats import IDENTITY
from ..formats.encoding import Encoding, cached_encoding
from ..kernels import Target
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, PlanePair, PlaneSource, matrix_shape, overlaps
from ..tensor import PlaneBuffers, QuantizedTensor, QuantizedTensorStorage
from . import observer
from .base import Quantizer
from .noop_flag import is_set, undone_if_set


class IdentityTensorStorage(QuantizedTensorStorage):
    """One buffer in high precision for both directions.

    Examples:
        >>> quantizer = cg.IdentityQuantizer()
        >>> quantizer.internal = True  # planes without a torch.Tensor around them
        >>> type(quantizer(torch.ones(128, 128)))
        <class 'crossgrain.quantizers.identity.IdentityTensorStorage'>
    """

    _buffer_names = ("_hp_data",)
    _plane_buffers: ClassVar = {
        ROWWISE: PlaneBuffers("_hp_data", None),
        COLUMNWISE: PlaneBuffers("_hp_data", None),
    }

    _hp_data: Tensor | None

    def _init_fields(
        self,
        hp_data: Tensor | None,
        fake_dtype: torch.dtype | None = None,
        quantizer: Quantizer | None = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        if fake_dtype is None and hp_data is not None:
            fake_dtype = hp_data.dtype
        shape = hp_data.shape if shape is None and hp_data is not None else shape
        self._init_common(dict.fromkeys(Direction, IDENTITY), quantizer, fake_dtype, shape, (hp_data,))

    def get_metadata(self) -> dict[str, Any]:
        metadata = {
            "hp_data": self._hp_data,
            "fake_dtype": self._dtype,
            "quantizer": self._quantizer,
        }
        return self._lending(metadata)

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        return (self._hp_data, None) if rowwise_data and columnwise_data else self._hp_data

    def planes(self) -> list[Plane]:
        """The one plane that has a buffer."""
        plane = self.plane(ROWWISE)
        return [] if plane is None else [plane]

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Do nothing: both directions are always available."""

    def _decoded(self, dtype: torch.dtype, direction: Direction | None) -> Tensor:
        """The buffer itself, or a copy if it must be cast."""
        return self._readable_plane(direction).data.to(dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Self:
        """Write to the buffer, in its dtype, so that views change as well."""
        IdentityQuantizer(dtype=self._buffer().dtype).update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    # Under another nominal dtype the numbers are of that dtype: later writes must not be rounded to the old one.

    def _rewrap(
        self,
        *,
        dtype: torch.dtype | None = None,
        buffers: Mapping[str, Tensor | None] | None = None,
        **changes: Any,
    ) -> Self:
        if buffers is None and self._casts_to(dtype):
            buffers, changes = {"_hp_data": self._buffer().to(dtype)}, {**changes, "fresh": True}
        return super()._rewrap(dtype=dtype, buffers=buffers, **changes)

    def _map_buffers(self, change: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        dtype = changes.get("dtype")
        if not self._casts_to(dtype):
            return super()._map_buffers(change, **changes)
        return super()._map_buffers(lambda buffer: change(buffer).to(dtype), **changes)

    def _casts_to(self, dtype: torch.dtype | None) -> bool:
        """Whether ``dtype`` is another one than that of the numbers; a dtype that the quantizer was given stays."""
        if dtype is None or self._hp_data is None or getattr(self._quantizer, "dtype", None) is not None:
            return False
        return self._hp_data.dtype == self._dtype != dtype

    # A plain buffer can be viewed and cut like any tensor.

    def _on_buffer(self, buffer: Tensor) -> Self:
        cut = () if buffer.numel() == self._buffer().numel() else (0,)
        return self._rewrap(
            shape=buffer.shape,
            matrix=matrix_shape(buffer.shape),
            buffers={"_hp_data": buffer},
            cut_axes=cut or self._cut_axes,
        )

    def _viewed(self, shape: Sequence[int]) -> Self:
        return self._on_buffer(self._buffer().view(tuple(shape)))

    def _sliced(self, dim: int, start: int, stop: int) -> Self:
        if (start, stop) == (0, self._shape[dim]):
            return self._rewrap()
        return self._on_buffer(self._buffer().narrow(dim, start, stop - start))

    def _strided(self, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Self:
        return self._on_buffer(self._buffer().as_strided(tuple(size), tuple(stride), offset))

    def _empty_like(
        self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Self:
        shape = self._shape if shape is None else shape
        buffer = torch.empty(tuple(shape), dtype=self._buffer().dtype, device=self.device if device is None else device)
        matrix = matrix_shape(shape)
        return self._rewrap(
            shape=shape, dtype=dtype, matrix=matrix, buffers={"_hp_data": buffer}, cut_axes=(), fresh=True
        )

    def _copy_bytes_from(self, src: QuantizedTensorStorage) -> bool:
        return False

    def _copy_planes(self, pairs: Sequence[tuple[Plane, Plane]]) -> None:
        for mine, theirs in pairs:
            mine.data.copy_(theirs.data)
        self._mark_written()

    def _buffer(self) -> Tensor:
        return self._readable_plane(None).data

    def _build_default_quantizer(self) -> Quantizer:
        return IdentityQuantizer()


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """A tensor in high precision with the interface of a quantized tensor. Its views share memory as usual.

    Examples:
        >>> q = cg.quantize(torch.ones(128, 128), "hp")
        >>> isinstance(q, cg.IdentityTensor)
        True
        >>> q.shape, q.dtype
        (torch.Size([128, 128]), torch.float32)
    """

    def _blank(self, shape: torch.Size, dtype: torch.dtype, buffers: Mapping[str, Tensor | None]) -> Self:
        buffer = buffers["_hp_data"]
        if buffer is None:
            return super()._blank(shape, dtype, buffers)
        placement: dict[str, Any] = {"stride": buffer.stride(), "storage_offset": int(buffer.storage_offset())}
        with torch.inference_mode(self.is_inference()):
            return type(self)._wrapper(shape, dtype, buffer.device, **placement)


class IdentityQuantizer(Quantizer):
    """Keeps tensors in high precision: the result holds the (detached) input.

    Args:
        dtype: cast the input to this dtype, which is then that of the result; None to keep it as it is.
        rowwise: accepted; both directions are always available.
        columnwise: see rowwise.

    Examples:
        >>> quantizer = cg.IdentityQuantizer(dtype=torch.bfloat16)
        >>> quantizer(torch.ones(2, 2)).dequantize().dtype
        torch.bfloat16
    """

    _tensor_class = IdentityTensor
    _value_fields = ("dtype",)

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def _encoding(self, direction: Direction) -> Encoding:
        return cached_encoding(IDENTITY)

    def quantize_impl(self, tensor: Tensor) -> Any:
        tensor = self._checked(tensor, list(Direction))
        kept = tensor.detach() if self.dtype is None else tensor.detach().to(self.dtype)
        if observer.observers:
            shape = matrix_shape(tensor.shape)
            self._tell(tensor.reshape(shape), kept.reshape(shape), self.rowwise_usage, self.columnwise_usage)
        return self._wrapped(kept, kept.dtype)

    def _tell(self, matrix: Tensor, kept: Tensor, rowwise: bool, columnwise: bool) -> None:
        plane = Plane(IDENTITY, ROWWISE if rowwise else COLUMNWISE, matrix_shape(kept.shape), kept)
        directions = [d for d, asked in ((ROWWISE, rowwise), (COLUMNWISE, columnwise)) if asked]
        observer.tell(self.subject, matrix, [(Target(plane, self.encoding(ROWWISE)), directions)])

    def _check_matrix(self, matrix: Tensor, *, rowwise: bool, columnwise: bool) -> None:
        self._as_plain(matrix)

    def _only_writes(self) -> bool:
        return False  # it keeps the matrix

    def make_planes(self, matrix: Tensor, *, rowwise: bool, columnwise: bool) -> PlaneSource:
        if not self.makes_planes:
            return self._planes_of_storage(matrix, rowwise, columnwise)
        self._as_plain(matrix)
        kept = matrix.detach() if self.dtype is None else matrix.detach().to(self.dtype)
        rows, columns = (Plane(IDENTITY, direction, matrix_shape(kept.shape), kept) for direction in Direction)
        if observer.observers:
            self._tell(matrix, kept, rowwise, columnwise)
        return PlanePair(rows if rowwise else None, columns if columnwise else None)

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Copy ``src`` to ``dst``, in place if the buffers have the same dtype and device; otherwise to a new buffer.

        See `Quantizer.update_quantized`.
        """
        if not isinstance(dst, IdentityTensorStorage):
            raise ValueError(f"IdentityQuantizer can only write to an IdentityTensor, got a {type(dst).__name__}")
        if is_set(noop_flag):
            return dst
        src = self._checked(src, list(Direction))
        buffer = dst._buffer()
        new = src.detach() if self.dtype is None else src.detach().to(self.dtype)
        if new.shape != dst.shape:
            raise ValueError(
                f"IdentityQuantizer: cannot write a tensor of shape {list(new.shape)} to one of shape {list(dst.shape)}"
            )
        if new.dtype == buffer.dtype and new.device == buffer.device:
            with undone_if_set(noop_flag, dst, self):
                buffer.copy_(new.clone() if overlaps(new, buffer) else new)
        elif noop_flag is not None and noop_flag.device.type == "cuda" and noop_flag.item() != 0:
            return dst  # a new buffer of another kind cannot be chosen on the device
        elif dst._cut_axes:
            raise ValueError(
                f"IdentityQuantizer: a slice of a {buffer.dtype} tensor on {buffer.device} cannot be replaced by "
                f"{new.dtype} numbers on {new.device}"
            )
        else:
            dst._hp_data = new.clone()
        dst._mark_written()
        return dst

    def check_writable(self, dst: QuantizedTensorStorage) -> None:
        """Accept everything: any numbers can be written to a plain buffer."""

    def _made(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False) -> Any:
        kept = torch.empty(tuple(shape), dtype=self.dtype or dtype, device=device, pin_memory=pin_memory)
        return self._wrapped(kept, kept.dtype)

    def _wrapped(self, kept: Tensor, dtype: torch.dtype) -> Any:
        if self.internal:
            return IdentityTensorStorage(kept, dtype, self)
        return IdentityTensor(
            kept.shape,
            dtype,
            hp_data=kept,
            quantizer=self,
            stride=kept.stride(),
            storage_offset=int(kept.storage_offset()),
        )

    def is_quantizable(self, inp: Tensor) -> bool:
        return True

    def is_requantization_safe(self) -> bool:
        return True
