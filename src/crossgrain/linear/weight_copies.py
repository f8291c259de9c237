"""Quantized copies of weights that later calls use: when they may be used, and how they are made."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import Tensor

from ..planes import ROWWISE
from ..quantizers.base import Quantizer
from ..quantizers.identity import IdentityQuantizer
from ..runtime.passes import current_pass
from ..tensor import QuantizedTensorStorage
from .call import LinearCall
from .operands import weight_matrix
from .padding import Sizes, known_format


def repeats(quantizer: Quantizer) -> bool:
    """Whether ``quantizer`` makes codes, and the same from the same numbers in every call, on this rank alone."""
    fmt = known_format(quantizer, ROWWISE)
    plain = quantizer.plain_quantizers()
    return (
        fmt is not None
        and not fmt.is_identity
        and not any(own.statistics() or own.with_amax_reduction or own.custom for own in plain)
        and all(own.is_requantization_safe() for own in plain)
    )


def frees_gathered_weights() -> bool:
    """Whether this may be a program that shards weights: it gathers them for a moment, and copies would stay."""
    return "torch.distributed.fsdp" in sys.modules and dist.is_initialized() and dist.get_world_size() > 1


def copies_columns(call: LinearCall) -> bool:
    """Whether a copy for later calls has columns: while training, even if this call's input needs no gradient."""
    return current_pass().trains and call.makes_columns(call.weight)


def quantized_copy(call: LinearCall, weight: Tensor, columnwise: bool) -> QuantizedTensorStorage:
    """A copy of the weight for later calls. What stays in high precision is a copy, too: the weight may change."""
    quantizer = call.weight
    assert quantizer is not None
    padded = call.padding.padded(Sizes(0, weight.shape[1], weight.shape[0]), backward=True)
    numbers = weight_matrix(weight, padded)
    if any(isinstance(own, IdentityQuantizer) for own in quantizer.plain_quantizers()):
        numbers = numbers.clone()
    made: QuantizedTensorStorage = quantizer.storing(rowwise=True, columnwise=columnwise).quantize(numbers)
    return made
