"""`check_pairs`: whether the GEMMs of a layer can multiply what its quantizers make."""

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
    """Check that the two operands of every GEMM of a layer can be multiplied without decoding.

    Args:
        quantizers: by tensor, ``{"input": ..., "weight": ..., "grad_output": ...}``. GEMMs with an operand that is
            missing are not checked.
        layer: name of the layer, for the message.
        allow_mixed: accept everything, because such operands are decoded.

    Raises:
        ValueError: two operands have scales of different kinds, or only one of them is rotated.

    Examples:
        >>> pair = {"input": cg.quantizer_for("mxfp8"), "weight": cg.quantizer_for("nvfp4")}
        >>> cg.recipe.check_pairs(pair, allow_mixed=True)
        >>> cg.recipe.check_pairs(pair, layer="fc1")
        Traceback (most recent call last):
        ValueError: ...
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
        return fp8_format()  # all requests are for FP8 with a scale per tensor
    assert isinstance(child, Quantizer)
    return child.encoding(direction).format
