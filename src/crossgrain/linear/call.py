"""One call of a linear layer: all but its tensors, and what is checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.dtypes import HIGH_PRECISION
from ..planes import PlaneSource
from ..quantizers.base import Quantizer
from ..recipe.base import BackwardOverride
from .gathered_weight import GatheredWeight
from .padding import NO_PADDING, Padding, Sizes
from .parallel import TensorParallel


class Needs(NamedTuple):
    """Which gradients are wanted. Known before autograd is entered: inside, gradients are always off."""

    dx: bool
    dw: bool
    db: bool


@dataclass
class LinearCall:
    """All of one call of a linear layer but its tensors.

    ``input``, ``weight``, ``grad_output``  the quantizers; without them the layer computes as the tensors are
    ``output``, ``grad_input``              quantizers of what is handed on, if that is to be quantized
    ``padding``                             what the blocks of these quantizers ask of the sizes
    ``dtype``                               of activations and their gradients
    ``quantized_weight``                    planes of W that the caller has cached, used instead of quantizing it again
    ``quantized_input``                     planes of x, padded, that the caller has made together with others
    ``quantized_gradient``                  the same for dy; set before backward
    ``backward_override``                   what the GEMMs of backward multiply instead of quantized operands
    ``keep_input``                          save x as it is for backward and quantize it again there
    ``on_backward``                         called before backward quantizes anything
    ``wgrad_queue``                         if given, backward appends a function to it that computes dW when it is
                                            called, instead of computing dW itself
    ``accumulate_main_grad``                add dW to ``weight.main_grad``
    ``weight_parts``                        the parameters that W was put together from, if it was
    ``parallel``                            how ranks share the layer, if they do
    ``layer``                               the name of the layer, for messages
    """

    dtype: torch.dtype
    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad_output: Quantizer | None = None
    output: Quantizer | None = None
    grad_input: Quantizer | None = None
    padding: Padding = NO_PADDING
    quantized_weight: PlaneSource | None = None
    quantized_input: PlaneSource | None = None
    quantized_gradient: PlaneSource | None = None
    backward_override: BackwardOverride = None
    allow_mixed: bool = False
    keep_input: bool = False
    accumulate_main_grad: bool = False
    wgrad_queue: list[Callable[[], None]] | None = None
    on_backward: Callable[[], None] | None = None
    weight_parts: Sequence[Tensor] | None = None
    parallel: TensorParallel | None = None
    layer: str = "Linear"

    @property
    def quantizes_backward(self) -> bool:
        """Whether the GEMMs of backward multiply quantized operands."""
        return self.input is not None and self.backward_override is None

    def sizes(self, x: Tensor, weight: Tensor, *, backward: bool) -> tuple[Sizes, Sizes]:
        """Of x, W and dy: as they are, and padded."""
        rows = math.prod(x.shape[:-1])
        if self.parallel is not None:
            self.parallel.check(x.shape, self.layer)
            rows *= self.parallel.size if self.parallel.gathers_input else 1
        sizes, padding = Sizes(rows, x.shape[-1], weight.shape[0]), self.padding
        m = padding.m_backward if backward else padding.m_forward
        whole_blocks = not (sizes.m % m or sizes.k % padding.k or sizes.n % padding.n)
        return sizes, sizes if whole_blocks else padding.padded(sizes, backward=backward)


def activation_dtype(x: Tensor, otherwise: torch.dtype | None = None) -> torch.dtype:
    """The dtype a module computes in: that of torch.autocast if active, else ``otherwise``, else that of the input."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if otherwise is None else otherwise


def check_input(x: Tensor, weight: Tensor, layer: str) -> None:
    """Raise unless ``x`` ends in what ``weight`` takes."""
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{layer}: the last dimension of the input {list(x.shape)} must be {weight.shape[-1]}, as the weight "
            f"{list(weight.shape)} has that many columns"
        )


def check_dtypes(weight: Tensor, call: LinearCall) -> None:
    """Raise if an operand is to be quantized and is of a dtype that cannot be."""
    if call.input is None or (weight.dtype in HIGH_PRECISION and call.dtype in HIGH_PRECISION):
        return
    operand, dtype = ("weight", weight.dtype) if weight.dtype not in HIGH_PRECISION else ("input", call.dtype)
    raise TypeError(
        f"{call.layer}: the {operand} is {dtype}, and only float32, bfloat16 and float16 can be quantized. Convert it, "
        "or run this layer without a recipe."
    )


def check_takes_gradient(weight: Tensor, layer: str) -> None:
    """Raise if a gradient that does not go through autograd would get lost at ``weight``."""
    if not weight.is_leaf:
        raise RuntimeError(
            f"{layer}: the weight was computed from other tensors, which a weight gradient that is delayed "
            "(delay_wgrad_compute) or added to main_grad (fuse_wgrad_accumulation) would not reach. Switch that option "
            "off for this layer."
        )
    if isinstance(weight, GatheredWeight) or getattr(weight, "_shard", None) is not None:
        raise NotImplementedError(
            f"{layer}: the weight is sharded by FSDP2, which reduces gradients when autograd hands them over. A weight "
            "gradient that is delayed (delay_wgrad_compute) or added to main_grad (fuse_wgrad_accumulation) would not "
            "reach the other ranks; switch that option off for this layer."
        )
