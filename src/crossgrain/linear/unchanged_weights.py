"""`UnchangedWeights`: quantized copies of weights that do not change from call to call.

In inference, and of weights that are frozen, quantizing the weight again in every call would be most of the work. A
copy is used as long as the numbers of the weight are the same. They are compared by a fingerprint of all of them:
version counters of torch do not see writes through ``parameter.data``, as by weight averaging, or when peft merges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..planes import COLUMNWISE
from ..tensor import QuantizedTensorStorage


class _Entry(NamedTuple):
    copy: QuantizedTensorStorage
    made_from: tuple[bytes, torch.Size, bool, torch.dtype]


class UnchangedWeights:
    """Quantized copies.

    Attributes:
        copies: the copies by any key, with what they were made from.
    """

    def __init__(self) -> None:
        self.copies: dict[Hashable, _Entry] = {}

    def get(
        self, key: Hashable, weight: Tensor, *, columnwise: bool, make: Callable[[bool], QuantizedTensorStorage]
    ) -> QuantizedTensorStorage | None:
        """Return a copy of the weight as it is now; None if a fingerprint of it cannot be made fast.

        Args:
            key: what the copy is for.
            weight: the weight.
            columnwise: whether the columnwise plane is needed. A copy that has one keeps it.
            make: makes the copy; its argument says whether to make the columnwise plane.
        """
        by_rows = weight.is_contiguous()
        memory = weight.detach() if by_rows else weight.detach().t()
        fingerprint = kernels.fingerprint(memory) if memory.is_contiguous() else None
        if fingerprint is None:
            return None
        # The same memory read by columns is another weight, which only this tells if it is square.
        now, entry = (fingerprint, memory.shape, by_rows, memory.dtype), self.copies.get(key)
        if entry is None or entry.made_from != now or (columnwise and entry.copy.plane(COLUMNWISE) is None):
            with torch.inference_mode(False), torch.no_grad():  # a copy made for inference may be used for training
                entry = self.copies[key] = _Entry(make(columnwise), now)
        return entry.copy

    def clear(self) -> None:
        """Remove all copies."""
        self.copies.clear()
