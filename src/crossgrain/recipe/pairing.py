"""Which formats may meet in a GEMM.

A GEMM reads one direction of each of two tensors, and the hardware multiplies only operands that are scaled
alike: it is the two operands of a GEMM that have to agree, not the two directions of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..formats import Format, fp8_format
from ..plane import COLUMNWISE, ROWWISE, Direction
from ..quantizer import Quantizer
from ..request import QuantizerRequest

# The three GEMMs of a linear layer and the direction in which each reads its two operands.
GEMMS: dict[str, dict[str, Direction]] = {
    "fprop": {"input": ROWWISE, "weight": ROWWISE},
    "dgrad": {"grad_output": ROWWISE, "weight": COLUMNWISE},
    "wgrad": {"grad_output": COLUMNWISE, "input": COLUMNWISE},
}
TENSORS = ("input", "weight", "grad_output")


def scaling_family(fmt: Format) -> str:
    """How a format is scaled, in words: formats of one family can be multiplied as they are.

    Elements do not matter, as the hardware mixes E4M3 with E5M2 and MXFP8 with MXFP4; nor do tiles.
    """
    if fmt.is_identity:
        return "high precision"
    if fmt.block is None:
        return "FP8 with a scale per tensor"
    if fmt.scale_rule == "fp32":
        return f"FP8 in blocks of {fmt.block_length}"
    if fmt.scale_rule == "two_level":
        return "NVFP4" if fmt.block_length == 16 else f"two-level scales over {fmt.block_length}"
    return "MX" if fmt.block_length == 32 else f"power-of-two scales over {fmt.block_length}"


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


def check_operands(gemm: str, operands: list[tuple[str, Direction, Format]], layer: str = "") -> None:
    """Raise ValueError unless these two (tensor, direction, format) can be multiplied as they are."""
    if len(operands) < 2:
        return
    (_, _, first), (_, _, second) = operands
    families = [scaling_family(first), scaling_family(second)]
    if families[0] != families[1]:
        problem = f"both operands of a GEMM have to be scaled alike, and these are {families[0]} and {families[1]}"
    elif first.rotation != second.rotation:
        problem = "either both operands have the same Hadamard rotation (rht) or none has one"
    else:
        return
    sides = " by ".join(f"{tensor} {direction.value} ({fmt.name})" for tensor, direction, fmt in operands)
    where = f"layer {layer!r}: " if layer else ""
    raise ValueError(
        f"{where}{gemm} multiplies {sides}, but {problem}. Change one of them, or set allow_mixed to have both decoded "
        "before they are multiplied"
    )


def _format_of(quantizer: Quantizer | QuantizerRequest, direction: Direction) -> Format:
    child = getattr(quantizer, f"{direction.value}_quantizer", quantizer)  # of a hybrid quantizer
    if isinstance(child, QuantizerRequest):
        return fp8_format()  # all that wait for a history are FP8 with a scale per tensor
    assert isinstance(child, Quantizer)
    return child.encoding(direction).format
