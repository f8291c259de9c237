"""`OperationContext`: what an operation keeps between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..quantizers.base import Quantizer
from ..tensor import QuantizedTensorStorage, prepare_for_saving, restore_from_saved


class OperationContext:
    """Keeps data of an operation from forward to backward, like ``ctx`` of an autograd function.

    An operation may set any attribute.

    Attributes:
        requires_grad: whether the backward of the operation will run.
        input_requires_grad: whether the gradient of its input is needed.
        grad_input_quantizer: quantizer for the gradient of its input, which the operation before can use; None to pass
            the gradient on unquantized.

    Examples:
        >>> ctx = cg.ops.OperationContext()  # what `op_forward` and `op_backward` get
        >>> ctx.save_for_backward(torch.ones(2))
        >>> ctx.saved_tensors
        (tensor([1., 1.]),)
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
        """Save tensors, quantized tensors or None for backward. Autograd checks that they are not modified."""
        self._saved = tensors
        plain = [tensor for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_inference()]
        self._versions = [(tensor, tensor._version) for tensor in plain]

    def _check_unchanged(self) -> None:
        """Raise if a saved tensor was modified since. Autograd itself checks only after the whole sequence has run."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that one operation of the sequence needs for backward was "
                    "changed in place by a later one: do not use in_place there"
                )
        self._versions = []

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self._saved


class SavedTensors:
    """Converts the saved tensors of many contexts to one flat list of plain tensors for autograd, and back.

    It can be used several times, because a graph may be kept and run backward again.
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
        """Return the flat list, once. From then on only autograd holds the tensors, so hooks may move them."""
        flat, self._flat = self._flat, []
        return flat

    def restore(self, flat: tuple[Tensor | None, ...]) -> None:
        """Give each context its tensors back."""
        tensors = iter(restore_from_saved(self._objects, flat))
        for context, count in zip(self._contexts, self._counts, strict=True):
            context._saved = tuple(next(tensors) for _ in range(count))

    def release(self) -> None:
        """Drop all references to the tensors after backward, so that autograd can free them."""
        for context in self._contexts:
            context._saved = ()
        for holder in self._objects:
            if isinstance(holder, QuantizedTensorStorage):
                holder.prepare_for_saving()


def _unshared(tensor: Any) -> Any:
    """A copy of a quantized tensor with the same buffers, because saving removes the buffers from the object."""
    return tensor._rewrap() if isinstance(tensor, QuantizedTensorStorage) else tensor
