"""What a quantized tensor asks of its quantizer.

The room of quantizers stands on this one, so tensors know their quantizer by this protocol alone.
`quantizers.base.Quantizer` implements it, and with it every quantizer of a user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..formats.encoding import Encoding
from ..planes import Direction, Plane

if TYPE_CHECKING:
    from .storage import QuantizedTensorStorage


class TensorQuantizer(Protocol):
    """Writes the planes of a tensor again, and makes other tensors like it."""

    internal: bool
    rowwise_usage: bool
    columnwise_usage: bool

    @property
    def derives_columns(self) -> bool:
        """Whether columns are made from what the rows decode to, not from the input."""

    def copy(self) -> Any: ...

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None: ...

    def plain_quantizers(self) -> list[Any]:
        """The quantizers of one format that it is made of."""

    def encoding(self, direction: Direction) -> Encoding: ...

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> Any: ...

    def make_quantized(self, tensor: Tensor, dtype: torch.dtype | None) -> Any:
        """`quantize` without autograd."""

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Write ``src`` to every plane of ``dst``."""

    def check_writable(self, dst: QuantizedTensorStorage) -> None:
        """Raise if `update_quantized` could not write to every plane of ``dst``."""

    def encode_planes(self, src: Tensor, dst: QuantizedTensorStorage, planes: Sequence[Plane]) -> None:
        """Write ``src`` to some planes of ``dst``."""

    def statistics(self) -> list[Tensor]:
        """What was seen of tensors so far and will scale the next ones."""

    def leave_group(self) -> None:
        """Reduce amaxes over no ranks from now on."""
