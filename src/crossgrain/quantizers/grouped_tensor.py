"""Tensors of one format in one memory: what a group of experts has, as one object.

    group = GroupedTensor.make_grouped_tensor_with_shapes(2, [(64, 128), (32, 128)], MXFP8Quantizer(E4M3))
    group.quantize([a, b])                          # into that memory
    a, b = group.split_into_quantized_tensors()     # ordinary tensors, whose buffers are parts of it

Buffers are flat: first those of the first tensor, then those of the second, each as the tensor alone would have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..planes import COLUMNWISE, ROWWISE
from ..runtime.devices import resolved_device
from .base import Quantizer
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer

Shape = tuple[int, int]

_FIELDS = {
    ROWWISE: ("rowwise_data", "scale_inv", "amax"),
    COLUMNWISE: ("columnwise_data", "columnwise_scale_inv", "columnwise_amax"),
}


class GroupedTensor:
    """``num_tensors`` matrices with the same number of columns.

    ``quantizer``                  of all of them; None: the numbers themselves are kept, rowwise
    ``logical_shape``              of all rows together
    ``first_dims``                 rows of each as a tensor, None if they are the same
    ``tensor_offsets, offsets``    where the numbers of each begin, counted in numbers, as a tensor and as a list
    ``rowwise_data, scale_inv, amax``  and the same with ``columnwise_``: flat buffers, None if there are none
    ``quantized_tensors``          the tensors, as parts of them
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.tensor_shapes: list[Shape] = [_matrix(shape) for shape in shapes]
        if len({columns for _, columns in self.tensor_shapes}) != 1:
            raise ValueError(f"the tensors of a group have the same number of columns, not those of {list(shapes)}")
        if isinstance(quantizer, HybridQuantizer | IdentityQuantizer) or (quantizer is not None and quantizer.custom):
            raise TypeError(f"a group has the buffers of one format, which {type(quantizer).__name__} does not make")
        self.quantizer, self.fake_dtype = quantizer, dtype or torch.float32
        self._place(resolved_device(device))
        self.rowwise_data: Tensor | None = None
        self.columnwise_data: Tensor | None = None
        self.scale_inv: Tensor | None = None
        self.columnwise_scale_inv: Tensor | None = None
        self.amax: Tensor | None = None
        self.columnwise_amax: Tensor | None = None
        self.scale: Tensor | None = None
        self.last_dims: Tensor | None = None
        self.quantized_tensors: list[Any] = []

    def _place(self, device: torch.device) -> None:
        rows = [first for first, _ in self.tensor_shapes]
        columns = self.tensor_shapes[0][1]
        self.device, self.num_tensors = device, len(rows)
        self.logical_shape = (sum(rows), columns)
        self.first_dims = None if len(set(rows)) == 1 else torch.tensor(rows, device=device)
        self.offsets = [0, *itertools.accumulate(first * columns for first in rows)]
        self.tensor_offsets = None if self.first_dims is None else torch.tensor(self.offsets, device=device)

    # ---- making them ---------------------------------------------------------------------------

    @classmethod
    def make_grouped_tensor_with_shapes(
        cls,
        num_tensors: int,
        shapes: Sequence[Sequence[int]],
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensor:
        """Uninitialised, with the directions that the quantizer is set to."""
        if len(shapes) != num_tensors:
            raise ValueError(f"a group of {num_tensors} tensors has as many shapes, not {len(shapes)}")
        group = cls(shapes, quantizer, device, dtype)
        if quantizer is None:
            group._take(torch.empty(group.offsets[-1], dtype=group.fake_dtype, device=group.device))
        else:
            make: Any = quantizer.make_empty
            members = [make(shape, dtype=group.fake_dtype, device=group.device) for shape in group.tensor_shapes]
            group._pack(members)
        return group

    @classmethod
    def make_grouped_tensor(
        cls,
        num_tensors: int,
        first_dims: Tensor | None,
        last_dims: Tensor | None,
        logical_first_dim: int,
        logical_last_dim: int,
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensor:
        """The same by the rows of each tensor, None if they are the same."""
        if last_dims is not None and len(set(last_dims.tolist())) != 1:
            raise ValueError(f"the tensors of a group have the same number of columns, not {last_dims.tolist()}")
        if first_dims is None and logical_first_dim % num_tensors:
            raise ValueError(f"{logical_first_dim} rows cannot be divided evenly among {num_tensors} tensors")
        rows = [logical_first_dim // num_tensors] * num_tensors if first_dims is None else first_dims.tolist()
        if sum(rows) != logical_first_dim:
            raise ValueError(f"tensors of {rows} rows do not make up {logical_first_dim} rows")
        shapes = [(first, logical_last_dim) for first in rows]
        return cls.make_grouped_tensor_with_shapes(num_tensors, shapes, quantizer, device, dtype)

    @classmethod
    def make_grouped_tensor_from_rowwise_data(
        cls, *, num_tensors: int, tensor_shape: Sequence[int], rowwise_data: Tensor, dtype: torch.dtype | None = None
    ) -> GroupedTensor:
        """Numbers that lie in one memory already, as a group of ``tensor_shape`` each."""
        group = cls([tensor_shape] * num_tensors, None, rowwise_data.device, dtype or rowwise_data.dtype)
        if rowwise_data.numel() != group.offsets[-1]:
            raise ValueError(
                f"{num_tensors} tensors of shape {list(tensor_shape)} have {group.offsets[-1]} numbers, "
                f"the memory has {rowwise_data.numel()}"
            )
        group._take(rowwise_data.reshape(-1))
        return group

    def _take(self, memory: Tensor) -> None:
        self.rowwise_data = memory
        parts = memory.split([first * columns for first, columns in self.tensor_shapes])
        self.quantized_tensors = [part.view(shape) for part, shape in zip(parts, self.tensor_shapes, strict=True)]

    def _pack(self, members: list[Any]) -> None:
        """Move the buffers of the tensors into one memory for each kind, of which they are parts from now on."""
        packed: dict[str, Tensor] = {}
        for direction, fields in _FIELDS.items():
            names = members[0]._plane_buffers[direction]
            for field, name in zip(fields, (names.data, names.scale, names.amax), strict=True):
                if not name or any(getattr(member, name) is None for member in members):
                    continue
                if name not in packed:  # both directions may have one scale
                    packed[name] = _moved(members, name)
                setattr(self, field, packed[name])
        self.quantized_tensors = members

    # ---- using them ----------------------------------------------------------------------------

    def quantize(self, tensors: Sequence[Tensor], noop_flag: Tensor | None = None) -> list[Any]:
        """Write all, into the memory there is; a ``noop_flag`` that is not zero leaves it as it is."""
        if len(tensors) != self.num_tensors:
            raise ValueError(f"a group of {self.num_tensors} tensors is written by as many, not {len(tensors)}")
        for index, (shape, tensor) in enumerate(zip(self.tensor_shapes, tensors, strict=True)):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"tensor {index} of the group has the shape {list(shape)}, not {list(tensor.shape)}")
        for member, tensor in zip(self.quantized_tensors, tensors, strict=True):
            if self.quantizer is not None:
                member.quantize_(tensor, noop_flag=noop_flag)
            elif noop_flag is None or noop_flag.item() == 0:
                member.copy_(tensor)
        return self.quantized_tensors

    def split_into_quantized_tensors(self) -> list[Any]:
        """The tensors, which share the memory."""
        return self.quantized_tensors

    def dequantize(self, dtype: torch.dtype | None = None) -> GroupedTensor:
        """A group of the numbers."""
        group = self.make_grouped_tensor_with_shapes(
            self.num_tensors, self.tensor_shapes, None, self.device, dtype or self.fake_dtype
        )
        plain = [member.dequantize() if self.quantizer is not None else member for member in self.quantized_tensors]
        group.quantize(plain)
        return group

    def has_data(self) -> bool:
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        return self.columnwise_data is not None

    def all_same_first_dim(self) -> bool:
        return self.first_dims is None

    def all_same_last_dim(self) -> bool:
        return True

    def all_same_shape(self) -> bool:
        return self.all_same_first_dim()

    def varying_both_dims(self) -> bool:
        return False

    def get_common_first_dim(self) -> int:
        """The rows of each."""
        if self.first_dims is not None:
            raise RuntimeError(f"the tensors have {self.first_dims.tolist()} rows, which are not the same")
        return self.tensor_shapes[0][0]

    def get_common_last_dim(self) -> int:
        return self.logical_shape[1]

    def get_dtype(self) -> torch.dtype:
        """What the tensors stand for."""
        return self.fake_dtype

    def __repr__(self) -> str:
        kind = "plain" if self.quantizer is None else type(self.quantizer).__name__
        return f"GroupedTensor({kind}, shapes={self.tensor_shapes}, dtype={self.fake_dtype})"


def quantized_group(rows: Tensor, quantizer: Quantizer, num_tensors: int, first_dims: Tensor | None) -> GroupedTensor:
    """``rows`` in groups of ``first_dims`` rows each, or of as many."""
    if rows.dim() != 2:
        raise ValueError(f"groups of rows are of a matrix, not of a tensor of shape {list(rows.shape)}")
    group = GroupedTensor.make_grouped_tensor(
        num_tensors, first_dims, None, rows.shape[0], rows.shape[1], quantizer, rows.device, rows.dtype
    )
    group.quantize(rows.detach().split([first for first, _ in group.tensor_shapes]))
    return group


def _matrix(shape: Sequence[int]) -> Shape:
    if len(shape) != 2:
        raise ValueError(f"the tensors of a group are matrices, not of shape {list(shape)}")
    return int(shape[0]), int(shape[1])


def _moved(members: Sequence[Any], name: str) -> Tensor:
    parts = [getattr(member, name) for member in members]
    memory = torch.cat([part.reshape(-1) for part in parts])
    for member, part, place in zip(members, parts, memory.split([part.numel() for part in parts]), strict=True):
        setattr(member, name, place.view(part.shape))
    return memory
