"""Whether the quantizers of a layer make operands that its GEMMs can multiply."""

from __future__ import annotations

from collections.abc import Mapping

from ..formats import Format, fp8_format
from ..gemm.operands import GEMMS, check_operands
from ..planes import Direction
from ..quantizers.base import Quantizer
from ..quantizers.request import QuantizerRequest


def check_pairs(
    quantizers: Mapping[str, Quantizer | QuantizerRequest | None], *, layer: str = "", allow_mixed: bool = False
) -> None:
    """Raise ValueError unless the two operands of every GEMM can be multiplied as they are.

    ``quantizers`` by tensor: ``{"input": ..., "weight": ..., "grad_output": ...}``; a GEMM with an operand
    that is not among them is not checked. ``allow_mixed`` accepts everything: such operands are decoded.
    """
    if allow_mixed:
        return
    for gemm, operands in GEMMS.items():
        chosen = [(tensor, direction, quantizers.get(tensor)) for tensor, direction in operands.items()]
        check_operands(
            gemm, [(t, d, _format_of(quantizer, d)) for t, d, quantizer in chosen if quantizer is not None], layer
        )


def _format_of(quantizer: Quantizer | QuantizerRequest, direction: Direction) -> Format:
    child = getattr(quantizer, f"{direction.value}_quantizer", quantizer)  # of a hybrid quantizer
    if isinstance(child, QuantizerRequest):
        return fp8_format()  # all that wait for a history are FP8 with a scale per tensor
    assert isinstance(child, Quantizer)
    return child.encoding(direction).format
