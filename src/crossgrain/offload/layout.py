"""Convert a strided tensor to its bytes, each once, and back to a tensor with the same strides.

Strides are restored because they can change results: a matrix product may sum in another order for another layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How to make a tensor from its bytes.

    Attributes:
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        stride: strides of the tensor.
        distinct: the shape without repetitions: 1 where the stride is 0.
        span: number of elements from the first to the last in memory.
        gaps: whether elements that are not part of the tensor lie between its own; they are not stored.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    distinct: tuple[int, ...]
    span: int
    gaps: bool

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """The layout of a tensor with at least one element."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        distinct = tuple(size if step else 1 for size, step in zip(shape, stride, strict=True))
        span = 1 + sum((size - 1) * step for size, step in zip(distinct, stride, strict=True))
        gaps = _product(distinct) < span
        return Layout(tensor.dtype, shape, stride, distinct, span, gaps)

    @property
    def nbytes(self) -> int:
        return (_product(self.distinct) if self.gaps else self.span) * self.dtype.itemsize

    def where(self, tensor: Tensor) -> Any:
        """A key for the memory of the tensor; views of the same bytes have the same key."""
        start = tensor.storage_offset() * self.dtype.itemsize
        gaps = (self.distinct, self.stride, self.dtype.itemsize) if self.gaps else None
        return tensor.untyped_storage()._cdata, start, self.nbytes, gaps

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """The bytes as uint8 [nbytes]: the memory of the tensor itself, or a copy if it has gaps."""
        if self.gaps:
            tensor = tensor.as_strided(self.distinct, self.stride).contiguous()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        start = tensor.storage_offset() * self.dtype.itemsize
        return memory.set_(tensor.untyped_storage(), start, (self.nbytes,), (1,))

    def tensor_of(self, stored: Tensor) -> Tensor:
        """The tensor with these bytes. It shares the memory of ``stored`` unless it has gaps."""
        elements = torch.empty(0, dtype=self.dtype, device=stored.device)
        memory, start = stored.untyped_storage(), stored.storage_offset() // self.dtype.itemsize
        if not self.gaps:
            return elements.set_(memory, start, self.shape, self.stride)
        contiguous = elements.set_(memory, start, (self.nbytes // self.dtype.itemsize,), (1,)).view(self.distinct)
        spread = torch.empty_strided(self.distinct, self.stride, dtype=self.dtype, device=stored.device)
        return spread.copy_(contiguous).as_strided(self.shape, self.stride)


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
