"""`GatheredWeight`: a sharded weight that was gathered in quantized form for its layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..planes import Direction
from ..quantizers.base import Quantizer
from ..tensor import QuantizedTensorStorage

aten = torch.ops.aten


class GatheredWeight(Tensor):
    """A weight with the shape and dtype of the parameter, for which only quantized planes are on this rank.

    Other code sees a tensor of its shape and dtype, which is decoded if it is read.

    Attributes:
        quantized: W as the layer would quantize it, with padding. Its buffers stay the same in every gather.
        made_by: the quantizer that made it.
    """

    quantized: QuantizedTensorStorage
    made_by: Quantizer

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[GatheredWeight],
        shape: Sequence[int],
        dtype: torch.dtype,
        quantized: QuantizedTensorStorage,
        made_by: Quantizer,
    ) -> GatheredWeight:
        new = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=quantized.device)
        new.quantized, new.made_by = quantized, made_by
        return new

    def used_by(self, quantizer: Quantizer | None, layer: str) -> QuantizedTensorStorage:
        """The quantized weight for a layer that would use ``quantizer``.

        Raises:
            RuntimeError: the layer computes in high precision, or in another format.
        """
        if quantizer is None:
            raise RuntimeError(
                f"{layer}: the weight {list(self.shape)} was gathered quantized, but the layer computes in high "
                "precision, for which only the decoded weight is available. Run it with the recipe that the model was "
                "sharded for"
            )
        if not _alike(self.made_by, quantizer):
            raise RuntimeError(
                f"{layer}: the weight {list(self.shape)} was gathered as {_described(self.made_by)}, but the active "
                f"recipe needs {_described(quantizer)}. Shard the model for this recipe."
            )
        return self.quantized

    def _decoded(self) -> Tensor:
        rows, columns = self.shape
        return self.quantized.dequantize(dtype=self.dtype)[:rows, :columns]

    def _alias(self) -> Self:
        return type(self)(self.shape, self.dtype, self.quantized, self.made_by)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        weight = args[0] if args else None
        if isinstance(weight, cls):
            if func in (aten.detach.default, aten.alias.default):
                return weight._alias()
            if func in (aten.view.default, aten.as_strided.default) and tuple(args[1]) == tuple(weight.shape):
                return weight._alias()
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} cannot write to a gathered weight, which is read-only: write to the shards")
        plain = tree_map(lambda value: value._decoded() if isinstance(value, cls) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.quantized!r}, shape={list(self.shape)}, dtype={self.dtype})"


def _alike(a: Quantizer, b: Quantizer) -> bool:
    same_encodings = all(a.encoding(direction) == b.encoding(direction) for direction in Direction)
    return a.derives_columns == b.derives_columns and same_encodings


def _described(quantizer: Quantizer) -> str:
    return " / ".join(quantizer.encoding(direction).format.name for direction in Direction)
