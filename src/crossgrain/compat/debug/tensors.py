"""The tensors and GEMMs of a linear layer under the names that Transformer Engine's debug features have for them."""

from __future__ import annotations

from ...gemm.operands import GEMMS
from ...planes import COLUMNWISE, ROWWISE, Direction

OPERANDS = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
"""Tensors that GEMMs read, and what crossgrain calls them."""

RESULTS = {"output": "fprop", "dgrad": "dgrad", "wgrad": "wgrad"}
"""Tensors that GEMMs make, and which GEMM makes each."""

TENSORS = (*OPERANDS, *RESULTS)
OF_GEMM = {gemm: tensor for tensor, gemm in RESULTS.items()}


def gemm_of(tensor: str, direction: Direction) -> str:
    """The GEMM that reads a tensor in a direction."""
    own = OPERANDS[tensor]
    return next(gemm for gemm, operands in GEMMS.items() if operands.get(own) is direction)


def gemms_with(tensor: str) -> list[str]:
    """The GEMMs that read or make a tensor."""
    if tensor in RESULTS:
        return [RESULTS[tensor]]
    return [gemm_of(tensor, direction) for direction in (ROWWISE, COLUMNWISE)]
