"""`LinearCall`: the options of one call of a linear layer; and checks that are made before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..formats.dtypes import HIGH_PRECISION
from ..planes import PlaneSource
from ..quantizers.base import Quantizer
from ..quantizers.identity import IdentityQuantizer
from ..recipe.base import BackwardOverride
from .gathered_weight import GatheredWeight
from .padding import NO_PADDING, Padding, Sizes
from .parallel import TensorParallel
from .probe import Probe


class Needs(NamedTuple):
    """Which gradients are wanted. Determined before the autograd function: inside it, gradients are always disabled.

    Attributes:
        dx: the gradient of the input.
        dw: the gradient of the weight.
        db: the gradient of the bias.
    """

    dx: bool
    dw: bool
    db: bool


@dataclass
class LinearCall:
    """The options of one call of a linear layer: everything except its tensors.

    Attributes:
        dtype: dtype of activations and their gradients.
        input: quantizer of x. Without quantizers the layer computes in high precision.
        weight: quantizer of W.
        grad_output: quantizer of dy.
        output: quantizer of y, if the layer returns it quantized.
        grad_input: quantizer of dx, if the layer returns it quantized.
        padding: multiples to which the sizes are padded, for the blocks of these quantizers.
        quantized_weight: planes of W that the caller has cached; W is not quantized again.
        quantized_input: padded planes of x that the caller has made, together with those of other layers.
        quantized_gradient: the same for dy; set before backward.
        backward_override: what backward multiplies instead of quantized operands; see `Recipe`.
        allow_mixed: see `Recipe`.
        keep_input: save x in high precision for backward, and quantize it again there.
        accumulate_main_grad: add dW to ``weight.main_grad``.
        wgrad_queue: if given, backward does not compute dW, but appends a function to this list that does.
        on_backward: called before backward quantizes anything.
        weight_parts: the parameters of which W consists, if there are several.
        parallel: how ranks share the layer; None if they do not.
        scale: multiplies y before it is rounded.
        gradient_scale: multiplies dx and dW before they are rounded; set before backward.
        wide_output: return y unrounded, in fp32 (fp64 for fp64 activations).
        wide_gradient: the same for dx; set before backward.
        layer: name of the layer, for messages.
        product: name of the layer in recipes, if ``layer`` has several products.
        probe: somebody who looks into this call.
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
    scale: float = 1.0
    gradient_scale: float = 1.0
    wide_output: bool = False
    wide_gradient: bool = False
    layer: str = "Linear"
    product: str = ""
    probe: Probe | None = None

    @property
    def quantizes_backward(self) -> bool:
        """Whether the GEMMs of backward multiply quantized operands."""
        return self.input is not None and self.backward_override is None

    def makes_columns(self, quantizer: Quantizer | None) -> bool:
        """Whether forward makes the columns of an operand: not if a quantizer makes them late."""
        if self.input is None or self.backward_override is not None:
            return False
        return quantizer is None or not quantizer.makes_columns_late

    @property
    def is_plain(self) -> bool:
        """Whether the layer is one of torch: it quantizes nothing, ranks do not share it, and autograd gets dW."""
        delivers = self.weight_parts is None and self.wgrad_queue is None and not self.accumulate_main_grad
        fused = self.gradient_scale != 1.0 or self.wide_gradient
        return self.input is None and self.parallel is None and self.grad_input is None and delivers and not fused

    def drop_identities(self, weight: Tensor) -> None:
        """Go without quantizers if all of them keep the numbers as they are: then gradients have gradients."""
        operands = (self.input, self.weight, self.grad_output)
        given = (self.quantized_weight, self.quantized_input, self.quantized_gradient, self.backward_override)
        keeps = all(type(operand) is IdentityQuantizer and operand.dtype is None for operand in operands)
        if keeps and weight.dtype == self.dtype and not any(value is not None for value in given):
            self.input = self.weight = self.grad_output = None

    def sizes(self, x: Tensor, weight: Tensor, *, backward: bool) -> tuple[Sizes, Sizes]:
        """The sizes of x, W and dy: without and with padding."""
        rows = math.prod(x.shape[:-1])
        if self.parallel is not None:
            self.parallel.check(x.shape, self.layer)
            rows *= self.parallel.size if self.parallel.gathers_input else 1
        sizes, padding = Sizes(rows, x.shape[-1], weight.shape[0]), self.padding
        m = padding.m_backward if backward else padding.m_forward
        whole_blocks = not (sizes.m % m or sizes.k % padding.k or sizes.n % padding.n)
        return sizes, sizes if whole_blocks else padding.padded(sizes, backward=backward)


def check_gradient_quantizer(quantizer: Quantizer, layer: str) -> None:
    """Raise ValueError if columns of gradients are to be made late: both GEMMs that read a gradient run at once."""
    if quantizer.makes_columns_late:
        raise ValueError(
            f"{layer}: the quantizer of grad_output has columnwise_source='rowwise_dequantized_late', but both planes "
            "of a gradient are read in the backward pass that makes them. Use 'rowwise_dequantized'."
        )


def activation_dtype(x: Tensor, otherwise: torch.dtype | None = None) -> torch.dtype:
    """The dtype of activations: that of an active torch.autocast; else ``otherwise``, if given; else that of ``x``."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if otherwise is None else otherwise


def check_input(x: Tensor, weight: Tensor, layer: str) -> None:
    """Raise ValueError if the last dimension of ``x`` does not fit ``weight``."""
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{layer}: the last dimension of the input {list(x.shape)} must be {weight.shape[-1]}, because the weight "
            f"{list(weight.shape)} has that many columns"
        )


def check_dtypes(weight: Tensor, call: LinearCall) -> None:
    """Raise TypeError if an operand has a dtype that cannot be quantized."""
    if call.input is None or (weight.dtype in HIGH_PRECISION and call.dtype in HIGH_PRECISION):
        return
    operand, dtype = ("weight", weight.dtype) if weight.dtype not in HIGH_PRECISION else ("input", call.dtype)
    raise TypeError(
        f"{call.layer}: the {operand} is {dtype}, but only float32, bfloat16 and float16 can be quantized. Convert it, "
        "or run this layer without a recipe."
    )


def check_takes_gradient(weight: Tensor, layer: str) -> None:
    """Raise if a weight gradient that does not go through autograd would be lost."""
    if not weight.is_leaf:
        raise RuntimeError(
            f"{layer}: the weight was computed from other tensors. A weight gradient that is delayed "
            "(delay_wgrad_compute) or added to main_grad (fuse_wgrad_accumulation) would not reach them; switch that "
            "option off for this layer."
        )
    if isinstance(weight, GatheredWeight) or getattr(weight, "_shard", None) is not None:
        raise NotImplementedError(
            f"{layer}: the weight is sharded by FSDP2, which reduces the gradients that autograd computes. A weight "
            "gradient that is delayed (delay_wgrad_compute) or added to main_grad (fuse_wgrad_accumulation) would not "
            "reach the other ranks; switch that option off for this layer."
        )
    replicas = DistributedDataParallel._get_active_ddp_module()
    if replicas is not None and any(parameter is weight for parameter in replicas._module_parameters):
        raise RuntimeError(
            f"{layer}: the weight is replicated by DistributedDataParallel, which reduces the gradients that autograd "
            "computes. A weight gradient that is delayed (delay_wgrad_compute) or added to main_grad "
            "(fuse_wgrad_accumulation) would not be reduced, and ranks would drift apart; switch that option off for "
            "this layer."
        )
