"""The flag of `update_quantized`: a number that says whether nothing is to be written, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..tensor.storage import QuantizedTensorStorage

if TYPE_CHECKING:
    from .base import Quantizer


def is_set(flag: Tensor | None) -> bool:
    """Whether a flag of the host is set. A flag on a GPU is not read: `undone_if_set` is for it."""
    return flag is not None and flag.device.type != "cuda" and flag.item() != 0


@contextmanager
def undone_if_set(flag: Tensor | None, dst: QuantizedTensorStorage, quantizer: Quantizer) -> Iterator[None]:
    """Context manager: what is written to ``dst`` inside is undone by the GPU itself, if its flag is set.

    The host does not wait, and a CUDA graph reads the flag anew in every replay. It costs a copy of the buffers.
    """
    if flag is None or flag.device.type != "cuda":
        yield
        return
    for plain in quantizer.plain_quantizers():
        plain._move_statistics(flag.device)  # inside, they would be replaced by others, which nobody undoes
    statistics = [value for plain in quantizer.plain_quantizers() for value in vars(plain).values()]
    written = [buffer for _, buffer in dst._buffers()] + [each for each in statistics if isinstance(each, Tensor)]
    before = [each.clone() for each in written]
    yield
    skip = flag.view(()) != 0
    with torch.no_grad():
        for now, old in zip(written, before, strict=True):
            now.copy_(torch.where(skip, old, now))
