"""What a quantizer would make, without making it: for code that traces or allocates by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.devices import resolved_device

_ANY_SHAPE = (128, 128)  # whole blocks of all built-in formats


class DataFree:
    """The part of a quantizer that describes its results by a tensor on the meta device."""

    def inner_tensor_specs(self, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each buffer of a quantized tensor, by name, for the current usages.

        Args:
            shape: shape of the tensor.

        Raises:
            NotImplementedError: the quantizer is a hybrid, or a custom one.
        """
        return {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in self._described(shape)._buffers()}

    def alloc_tensors(
        self, shape: Sequence[int], *, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor]:
        """Uninitialised buffers of `inner_tensor_specs`, as ``__tensor_unflatten__`` takes them."""
        specs = self.inner_tensor_specs(shape).items()
        return {name: torch.empty(of, dtype=dtype, device=resolved_device(device)) for name, (of, dtype) in specs}

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """The class of a quantized tensor, and the arguments of its constructor that are not buffers.

        Args:
            fake_dtype: nominal dtype: what `dequantize` returns.
        """
        described = self._described(_ANY_SHAPE, fake_dtype)
        buffers = {name.removeprefix("_") for name in described._buffer_names}
        buffers |= {name for name, value in described.get_metadata().items() if isinstance(value, Tensor)}
        arguments = {name: value for name, value in described.get_metadata().items() if name not in buffers}
        return {"cls": type(described), "nontensor_kwargs": arguments}

    def create_metadata(
        self, _shape: Sequence[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """The context that ``__tensor_unflatten__`` takes beside the buffers of `alloc_tensors`.

        Args:
            _shape: shape of the tensor.
            dtype: nominal dtype.
            requires_grad: must be False.
        """
        described = self._described(_shape, dtype)
        if requires_grad or not hasattr(described, "__tensor_flatten__"):
            raise NotImplementedError(
                f"{type(self).__name__}: __tensor_unflatten__ makes tensors that require no gradient, and no storages. "
                "Set internal=False, and call requires_grad_(True) on the tensor that it returns"
            )
        context: dict[str, Any] = described.__tensor_flatten__()[1]
        return context

    def _described(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Any:
        quantizer: Any = self
        if quantizer.custom or quantizer.plain_quantizers() != [self]:
            raise NotImplementedError(
                f"{type(self).__name__} cannot describe its buffers without data: make_empty(shape, device='meta') "
                "returns a tensor without memory"
            )
        return quantizer.make_empty(shape, dtype=dtype, device="meta")
