"""What an operation keeps between its forward and its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..quantizers.base import Quantizer
from ..tensor import QuantizedTensorStorage, prepare_for_saving, restore_from_saved


class OperationContext:
    """To an operation in a sequence what ``ctx`` is to an autograd function: any attribute may be set.

    ``requires_grad``         whether the operation's backward will run
    ``input_requires_grad``   whether anyone wants the gradient of its input
    ``grad_input_quantizer``  how that gradient is best handed on, by the operation before; None: as it is
    """

    def __init__(self) -> None:
        self.requires_grad = True
        self.input_requires_grad = True
        self.grad_input_quantizer: Quantizer | None = None
        self._saved: tuple[Any, ...] = ()
        self._versions: list[tuple[Tensor, int]] = []

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save_for_backward(self, *tensors: Any) -> None:
        """Tensors, quantized tensors and None. Autograd guards them until backward."""
        self._saved = tensors
        plain = [tensor for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_inference()]
        self._versions = [(tensor, tensor._version) for tensor in plain]

    def _check_unchanged(self) -> None:
        """Autograd takes over when the sequence has run; until then an operation may have written to a tensor."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor {list(tensor.shape)} that one operation of the sequence needs for backward was changed "
                    "in place by a later one: do not use in_place there"
                )
        self._versions = []

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self._saved


class SavedTensors:
    """The tensors of many contexts as one flat list of plain tensors for autograd, and the way back.

    A graph that is kept runs backward again, so nothing here is used up.
    """

    def __init__(self, contexts: list[OperationContext]) -> None:
        for context in contexts:
            context._check_unchanged()
        self._contexts = contexts
        self._counts = [len(context._saved) for context in contexts]
        everything = [_unshared(tensor) for context in contexts for tensor in context._saved]
        self._flat, self._objects = prepare_for_saving(*everything)
        for context in contexts:
            context._saved = ()

    def handed_over(self) -> list[Tensor | None]:
        """All of them, once: from here on autograd alone holds them, and hooks may take them elsewhere."""
        flat, self._flat = self._flat, []
        return flat

    def restore(self, flat: tuple[Tensor | None, ...]) -> None:
        """Give every context its tensors."""
        tensors = iter(restore_from_saved(self._objects, flat))
        for context, count in zip(self._contexts, self._counts, strict=True):
            context._saved = tuple(next(tensors) for _ in range(count))

    def release(self) -> None:
        """After backward: hold no memory that autograd may free."""
        for context in self._contexts:
            context._saved = ()
        for holder in self._objects:
            if isinstance(holder, QuantizedTensorStorage):
                holder.prepare_for_saving()


def _unshared(tensor: Any) -> Any:
    """Saving empties what is saved: others may still use the object."""
    return tensor._rewrap() if isinstance(tensor, QuantizedTensorStorage) else tensor
