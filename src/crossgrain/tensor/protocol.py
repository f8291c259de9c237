"""`TensorQuantizer`: what a quantized tensor needs from its quantizer.

The package `quantizers` imports this one, so tensors know quantizers only by this protocol. `quantizers.base.Quantizer`
implements it, and so does every quantizer of a user, which is a subclass.
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
    """Writes the planes of a tensor, and makes other tensors like it."""

    internal: bool
    rowwise_usage: bool
    columnwise_usage: bool

    @property
    def derives_columns(self) -> bool:
        """Whether columnwise planes are made from decoded rowwise planes, not from the input."""

    def copy(self) -> Any: ...

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None: ...

    def plain_quantizers(self) -> list[Any]:
        """The quantizers of one format that it consists of."""

    def encoding(self, direction: Direction) -> Encoding: ...

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> Any: ...

    def make_quantized(self, tensor: Tensor, dtype: torch.dtype | None) -> Any:
        """`quantize` without autograd."""

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Write ``src`` to every plane of ``dst``."""

    def check_writable(self, dst: QuantizedTensorStorage) -> None:
        """Raise ValueError if `update_quantized` cannot write to every plane of ``dst``."""

    def encode_planes(self, src: Tensor, dst: QuantizedTensorStorage, planes: Sequence[Plane]) -> None:
        """Write ``src`` to some planes of ``dst``."""

    def statistics(self) -> list[Tensor]:
        """The tensors with amaxes and scales of earlier steps, from which the next scales follow."""

    def leave_group(self) -> None:
        """Do not reduce amaxes over ranks from now on."""
