"""The quantizers of a layer whose operands features change: in high precision, or made by a feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...formats import IDENTITY, Format
from ...formats.encoding import Encoding, cached_encoding
from ...planes import COLUMNWISE, ROWWISE, Direction
from ...quantizers.base import Quantizer
from ...quantizers.hybrid import HybridQuantizer
from ...quantizers.identity import IdentityQuantizer, IdentityTensorStorage
from ...quantizers.nonfinite import Policy
from ...quantizers.subject import Subject
from ...tensor import QuantizedTensorStorage

Way = Literal["recipe", "high precision", "feature"]
"""How an operand is made: as the recipe says, not quantized, or by ``modify_tensor`` of a feature."""

Modify = Callable[[Tensor], Any]
"""A function of a matrix: returns a tensor to multiply in high precision, or a quantized one."""


class Modified(NamedTuple):
    """An operand that a feature makes, and its format, if that is known."""

    modify: Modify
    makes: Format | None = None


class FeatureQuantizer(Quantizer):
    """A quantizer whose result a function makes.

    Args:
        modify: the function.
        direction: the direction in which a GEMM reads the result.
        makes: the format of the result; None if it is not known.
        dtype: cast a result in high precision to this dtype; None to keep it as it is.
    """

    custom = True

    def __init__(
        self, modify: Modify, direction: Direction, makes: Format | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(rowwise=direction is ROWWISE, columnwise=direction is COLUMNWISE)
        self.makes = makes
        self.dtype = dtype
        self.modify = modify
        self.direction = direction

    def _encoding(self, direction: Direction) -> Encoding:
        return cached_encoding(IDENTITY)

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        made = self.modify(tensor)
        if not isinstance(made, QuantizedTensorStorage):
            kept = made.detach().to(made.dtype if self.dtype is None else self.dtype)
            return IdentityTensorStorage(kept, kept.dtype, IdentityQuantizer())
        if made.plane(self.direction) is None:
            made.update_usage(**{f"{self.direction.value}_usage": True})
        return made


def changed_quantizer(
    parent: Quantizer | None,
    ways: Mapping[Direction, Way],
    modified: Mapping[Direction, Modified],
    dtype: torch.dtype | None = None,
) -> Quantizer:
    """The quantizer of a tensor for which features have something to say.

    Args:
        parent: what the recipe has made; None for high precision.
        ways: how the plane of each direction is made.
        modified: the directions that a feature makes.
        dtype: dtype of activations, in which a layer without a recipe multiplies. Recipes keep the dtype of the tensor.
    """
    dtype = dtype if parent is None else None
    children = {
        direction: _child(parent, direction, ways[direction], modified.get(direction), dtype) for direction in Direction
    }
    made: Quantizer
    if all(isinstance(child, IdentityQuantizer) for child in children.values()):
        made = children[ROWWISE]
    else:
        keeps_source = isinstance(parent, HybridQuantizer) and ways[COLUMNWISE] == "recipe"
        made = HybridQuantizer(
            rowwise_quantizer=children[ROWWISE],
            columnwise_quantizer=children[COLUMNWISE],
            columnwise_source=parent.columnwise_source if keeps_source else "original",  # type: ignore[union-attr]
        )
    return _of_layer(made, parent)


def child_of(quantizer: Quantizer | None, direction: Direction) -> Quantizer | None:
    """The quantizer of one direction: a child of a hybrid, or the quantizer itself."""
    if isinstance(quantizer, HybridQuantizer):
        child: Quantizer = quantizer.child(direction)
        return child
    return quantizer


def _child(
    parent: Quantizer | None, direction: Direction, way: Way, modified: Modified | None, dtype: torch.dtype | None
) -> Quantizer:
    if way == "feature":
        assert modified is not None
        return _of_layer(FeatureQuantizer(modified.modify, direction, modified.makes, dtype), parent)
    own = child_of(parent, direction)
    if way == "high precision" or own is None:
        return _of_layer(IdentityQuantizer(dtype=dtype), parent)
    return own.copy()


def _of_layer(quantizer: Quantizer, parent: Quantizer | None) -> Quantizer:
    """Tell a quantizer what it is for, and what to do about NaNs and infinities."""
    subject: Subject | None = None if parent is None else parent.subject
    policy: Policy | None = None if parent is None else parent.nonfinite
    quantizer.nonfinite = policy
    if subject is not None:
        quantizer.subject = subject
    return quantizer
