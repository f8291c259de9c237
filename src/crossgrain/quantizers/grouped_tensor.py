"""`GroupedTensor`: several quantized matrices in common buffers, as the weights of experts.

    group = GroupedTensor.make_grouped_tensor_with_shapes(2, [(64, 128), (32, 128)], MXFP8Quantizer(E4M3))
    group.quantize([a, b])                          # writes to the common buffers
    a, b = group.split_into_quantized_tensors()     # ordinary tensors, whose buffers are parts of the common ones

Buffers are flat: first the bytes of the first tensor, then those of the second, each as in a tensor of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..planes import COLUMNWISE, ROWWISE
from ..runtime.devices import resolved_device
from ..runtime.host_and_device import on_device
from .base import Quantizer
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer
from .noop_flag import is_set

Shape = tuple[int, int]

_FIELDS = {
    ROWWISE: ("rowwise_data", "scale_inv", "amax"),
    COLUMNWISE: ("columnwise_data", "columnwise_scale_inv", "columnwise_amax"),
}


class GroupedTensor:
    """Several matrices with the same number of columns.

    Args:
        shapes: the shape of each matrix.
        quantizer: quantizer of all of them; None to keep the numbers in high precision, rowwise.
        device: the device.
        dtype: nominal dtype; float32 by default.

    Attributes:
        num_tensors: number of matrices.
        tensor_shapes: the shape of each matrix.
        logical_shape: shape of all rows together.
        first_dims: number of rows of each matrix, as a tensor; None if it is the same for all.
        offsets: where each matrix begins, counted in numbers.
        tensor_offsets: the same as a tensor; None if all matrices have the same number of rows.
        rowwise_data: flat buffer of the rowwise codes; None if there are none. ``scale_inv`` and ``amax`` are the
            buffers of their scales and amaxes.
        columnwise_data: the same for columnwise planes, with ``columnwise_scale_inv`` and ``columnwise_amax``.
        quantized_tensors: the matrices, whose buffers are parts of these buffers.

    Raises:
        ValueError: the shapes are not those of matrices with the same number of columns.
        TypeError: the quantizer is a hybrid, an identity or a custom quantizer.
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
            raise ValueError(f"the tensors of a group must have the same number of columns, got shapes {list(shapes)}")
        if isinstance(quantizer, HybridQuantizer | IdentityQuantizer) or (quantizer is not None and quantizer.custom):
            raise TypeError(
                "the quantizer of a group must make codes of one format (not a hybrid, identity or custom quantizer), "
                f"got {type(quantizer).__name__}"
            )
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
        self.first_dims = None if len(set(rows)) == 1 else on_device(rows, device)
        self.offsets = [0, *itertools.accumulate(first * columns for first in rows)]
        self.tensor_offsets = None if self.first_dims is None else on_device(self.offsets, device)

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
        """Make a group with uninitialised buffers, in the directions of the quantizer's usages.

        Args:
            num_tensors: number of matrices.
            shapes: the shape of each matrix.
            quantizer: see `GroupedTensor`.
            device: see `GroupedTensor`.
            dtype: see `GroupedTensor`.
        """
        if len(shapes) != num_tensors:
            raise ValueError(f"a group of {num_tensors} tensors needs {num_tensors} shapes, got {len(shapes)}")
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
        """Make a group with uninitialised buffers from the numbers of rows.

        Args:
            num_tensors: number of matrices.
            first_dims: number of rows of each matrix; None if it is the same for all.
            last_dims: number of columns of each matrix, which must be the same; None if not given.
            logical_first_dim: number of all rows.
            logical_last_dim: number of columns.
            quantizer: see `GroupedTensor`.
            device: see `GroupedTensor`.
            dtype: see `GroupedTensor`.
        """
        if last_dims is not None and len(set(last_dims.tolist())) != 1:
            raise ValueError(f"the tensors of a group must have the same number of columns, got {last_dims.tolist()}")
        if first_dims is None and logical_first_dim % num_tensors:
            raise ValueError(f"{logical_first_dim} rows cannot be divided evenly among {num_tensors} tensors")
        rows = [logical_first_dim // num_tensors] * num_tensors if first_dims is None else first_dims.tolist()
        if sum(rows) != logical_first_dim:
            raise ValueError(
                f"first_dims {rows} add up to {sum(rows)} rows, but logical_first_dim is {logical_first_dim}"
            )
        shapes = [(first, logical_last_dim) for first in rows]
        return cls.make_grouped_tensor_with_shapes(num_tensors, shapes, quantizer, device, dtype)

    @classmethod
    def make_grouped_tensor_from_rowwise_data(
        cls, *, num_tensors: int, tensor_shape: Sequence[int], rowwise_data: Tensor, dtype: torch.dtype | None = None
    ) -> GroupedTensor:
        """Make a group of matrices of one shape from numbers that are already in one buffer.

        Args:
            num_tensors: number of matrices.
            tensor_shape: shape of each matrix.
            rowwise_data: the numbers, in high precision.
            dtype: nominal dtype; by default that of ``rowwise_data``.
        """
        group = cls([tensor_shape] * num_tensors, None, rowwise_data.device, dtype or rowwise_data.dtype)
        if rowwise_data.numel() != group.offsets[-1]:
            raise ValueError(
                f"{num_tensors} tensors of shape {list(tensor_shape)} have {group.offsets[-1]} numbers, but "
                f"rowwise_data has {rowwise_data.numel()}"
            )
        group._take(rowwise_data.reshape(-1))
        return group

    def _take(self, memory: Tensor) -> None:
        self.rowwise_data = memory
        parts = memory.split([first * columns for first, columns in self.tensor_shapes])
        self.quantized_tensors = [part.view(shape) for part, shape in zip(parts, self.tensor_shapes, strict=True)]

    def _pack(self, members: list[Any]) -> None:
        """Move the buffers of the tensors into common buffers. Those of the tensors are parts of them from then on."""
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
        """Write all matrices, in place.

        Args:
            tensors: the new values of each matrix.
            noop_flag: a tensor with one number; if it is not zero, nothing is written.

        Returns:
            The matrices of the group.

        Raises:
            ValueError: the number or the shapes of the tensors are not those of the group.
        """
        if len(tensors) != self.num_tensors:
            raise ValueError(f"this group has {self.num_tensors} tensors, got {len(tensors)}")
        for index, (shape, tensor) in enumerate(zip(self.tensor_shapes, tensors, strict=True)):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"tensor {index} of the group has shape {list(shape)}, got {list(tensor.shape)}")
        for member, tensor in zip(self.quantized_tensors, tensors, strict=True):
            if self.quantizer is not None:
                member.quantize_(tensor, noop_flag=noop_flag)
            elif noop_flag is not None and noop_flag.device.type == "cuda":
                member.copy_(torch.where(noop_flag.view(()) != 0, member, tensor.to(member.dtype)))
            elif not is_set(noop_flag):
                member.copy_(tensor)
        return self.quantized_tensors

    def split_into_quantized_tensors(self) -> list[Any]:
        """The matrices, as quantized tensors that share the buffers of the group."""
        return self.quantized_tensors

    def dequantize(self, dtype: torch.dtype | None = None) -> GroupedTensor:
        """Decode all matrices to a new group in high precision."""
        group = self.make_grouped_tensor_with_shapes(
            self.num_tensors, self.tensor_shapes, None, self.device, dtype or self.fake_dtype
        )
        plain = [member.dequantize() if self.quantizer is not None else member for member in self.quantized_tensors]
        group.quantize(plain)
        return group

    def has_data(self) -> bool:
        """Whether the group has rowwise data."""
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        """Whether the group has columnwise data."""
        return self.columnwise_data is not None

    def all_same_first_dim(self) -> bool:
        """Whether all matrices have the same number of rows."""
        return self.first_dims is None

    def all_same_last_dim(self) -> bool:
        """Whether all matrices have the same number of columns: always True."""
        return True

    def all_same_shape(self) -> bool:
        """Whether all matrices have the same shape."""
        return self.all_same_first_dim()

    def varying_both_dims(self) -> bool:
        """Whether both dimensions differ between matrices: always False."""
        return False

    def get_common_first_dim(self) -> int:
        """The number of rows of each matrix.

        Raises:
            RuntimeError: it is not the same for all.
        """
        if self.first_dims is not None:
            raise RuntimeError(f"the tensors of this group have different numbers of rows: {self.first_dims.tolist()}")
        return self.tensor_shapes[0][0]

    def get_common_last_dim(self) -> int:
        """The number of columns of each matrix."""
        return self.logical_shape[1]

    def get_dtype(self) -> torch.dtype:
        """The nominal dtype."""
        return self.fake_dtype

    def __repr__(self) -> str:
        kind = "plain" if self.quantizer is None else type(self.quantizer).__name__
        return f"GroupedTensor({kind}, shapes={self.tensor_shapes}, dtype={self.fake_dtype})"


def quantized_group(rows: Tensor, quantizer: Quantizer, num_tensors: int, first_dims: Tensor | None) -> GroupedTensor:
    """Quantize the rows of a matrix in groups.

    Args:
        rows: the matrix.
        quantizer: the quantizer of all groups.
        num_tensors: number of groups.
        first_dims: number of rows of each group; None for groups of equal size.
    """
    if rows.dim() != 2:
        raise ValueError(f"rows must be a matrix, got a tensor of shape {list(rows.shape)}")
    group = GroupedTensor.make_grouped_tensor(
        num_tensors, first_dims, None, rows.shape[0], rows.shape[1], quantizer, rows.device, rows.dtype
    )
    group.quantize(rows.detach().split([first for first, _ in group.tensor_shapes]))
    return group


def _matrix(shape: Sequence[int]) -> Shape:
    if len(shape) != 2:
        raise ValueError(f"the tensors of a group must be matrices, got shape {list(shape)}")
    return int(shape[0]), int(shape[1])


def _moved(members: Sequence[Any], name: str) -> Tensor:
    parts = [getattr(member, name) for member in members]
    memory = torch.cat([part.reshape(-1) for part in parts])
    for member, part, place in zip(members, parts, memory.split([part.numel() for part in parts]), strict=True):
        setattr(member, name, place.view(part.shape))
    return memory
