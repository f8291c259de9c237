"""The bytes of a strided tensor, each once, and the tensor again, with the strides it had.

Strides are part of the value here: a matrix product may sum in another order for another layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How the bytes are to be read.

    ``distinct``  the shape without repetitions: 1 where the stride is 0
    ``span``      elements from the first to the last, in memory
    ``gaps``      other elements lie between those of the tensor: these are left out
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    distinct: tuple[int, ...]
    span: int
    gaps: bool

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """Of a tensor with at least one element."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        distinct = tuple(size if step else 1 for size, step in zip(shape, stride, strict=True))
        span = 1 + sum((size - 1) * step for size, step in zip(distinct, stride, strict=True))
        gaps = _product(distinct) < span
        return Layout(tensor.dtype, shape, stride, distinct, span, gaps)

    @property
    def nbytes(self) -> int:
        return (_product(self.distinct) if self.gaps else self.span) * self.dtype.itemsize

    def where(self, tensor: Tensor) -> Any:
        """What tells the memory of the tensor from other memory; views of the same bytes agree."""
        start = tensor.storage_offset() * self.dtype.itemsize
        gaps = (self.distinct, self.stride, self.dtype.itemsize) if self.gaps else None
        return tensor.untyped_storage()._cdata, start, self.nbytes, gaps

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """uint8 [nbytes]: the memory of the tensor itself, or a copy if it has gaps."""
        if self.gaps:
            tensor = tensor.as_strided(self.distinct, self.stride).contiguous()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        start = tensor.storage_offset() * self.dtype.itemsize
        return memory.set_(tensor.untyped_storage(), start, (self.nbytes,), (1,))

    def tensor_of(self, stored: Tensor) -> Tensor:
        """The tensor; without gaps it lies in the memory of ``stored``."""
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
