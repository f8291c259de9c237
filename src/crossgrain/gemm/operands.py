"""The three GEMMs of a linear layer: which direction of which tensor each reads, and which formats can be multiplied.

Hardware can only multiply operands whose scales are of the same kind. This is a condition for the two operands of a
GEMM, not for the two directions of a tensor.
"""

from __future__ import annotations

from ..formats import E4M3, Format, TableElement
from ..planes import COLUMNWISE, ROWWISE, Direction

# The three GEMMs of a linear layer and the direction in which each reads its two operands.
GEMMS: dict[str, dict[str, Direction]] = {
    "fprop": {"input": ROWWISE, "weight": ROWWISE},
    "dgrad": {"grad_output": ROWWISE, "weight": COLUMNWISE},
    "wgrad": {"grad_output": COLUMNWISE, "input": COLUMNWISE},
}
TENSORS = ("input", "weight", "grad_output")


def scaling_family(fmt: Format) -> str:
    """The kind of a format's scales, in words. Formats of one family can be multiplied without decoding.

    Elements do not matter, because hardware can multiply E4M3 by E5M2, and MXFP8 by MXFP4. Tiles do not matter either.
    But elements that are tables are not such floating point numbers, and can only be multiplied by the same element.
    """
    if fmt.is_identity:
        return "high precision"
    if isinstance(fmt.element, TableElement):
        return f"{fmt.element.name} with {_scales(fmt)}"
    if fmt.block is None:
        return "FP8 with a scale per tensor"
    if fmt.scale_rule == "fp32":
        return f"FP8 in blocks of {fmt.block_length}"
    if fmt.scale_rule == "two_level":
        name = "NVFP4" if fmt.block_length == 16 else f"two-level scales over {fmt.block_length}"
        return name if fmt.scale_element == E4M3 else f"{name} with {fmt.scale_element.name} block scales"
    return "MX" if fmt.block_length == 32 else f"power-of-two scales over {fmt.block_length}"


PairingKind = tuple[str, int | None]


def pairing_kind(fmt: Format) -> PairingKind:
    """What the two operands of a GEMM must have in common: the kind of scales, and the rotation."""
    return scaling_family(fmt), fmt.rotation


def _scales(fmt: Format) -> str:
    if fmt.block is None:
        return "a scale per tensor"
    kinds = {"fp32": "fp32 scales", "two_level": "two-level scales"}
    return f"{kinds.get(fmt.scale_rule, 'power-of-two scales')} over {fmt.block_length}"


def check_operands(gemm: str, operands: list[tuple[str, Direction, Format]], layer: str = "") -> None:
    """Check that the two operands of a GEMM can be multiplied without decoding.

    Args:
        gemm: "fprop", "dgrad" or "wgrad", for the message.
        operands: tensor, direction and format of both operands. Nothing is checked if there are fewer than two.
        layer: name of the layer, for the message.

    Raises:
        ValueError: their scales are of different kinds, or they are rotated differently.
    """
    if len(operands) < 2:
        return
    (_, _, first), (_, _, second) = operands
    families = [scaling_family(first), scaling_family(second)]
    if families[0] == families[1] and first.rotation == second.rotation:  # `pairing_kind`, without a call in every GEMM
        return
    problem = "both operands must have the same Hadamard rotation (rht), or none"
    if families[0] != families[1]:
        problem = f"both operands of a GEMM have to be scaled alike, and these are {families[0]} and {families[1]}"
    sides = " by ".join(f"{tensor} {direction.value} ({fmt.name})" for tensor, direction, fmt in operands)
    where = f"layer {layer!r}: " if layer else ""
    raise ValueError(
        f"{where}{gemm} multiplies {sides}, but {problem}. Change one format, or set allow_mixed to decode both "
        "operands before they are multiplied"
    )
