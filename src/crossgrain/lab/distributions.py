"""How the tensors of a model are distributed in each direction, for a report."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.observer import BackwardOperands, observe_backward
from .report import Distribution
from .sensitivity import Sensitivity
from .sensitivity.borrowed import borrowed
from .start import Start

_BLOCK = 16  # numbers that share a scale in NVFP4
_MOST_ROWS = 4096  # of a large tensor, the first rows are looked at
_TENSORS = ("input", "weight", "grad_output")


def distributions_of(start: Start, s: Sensitivity) -> list[Distribution]:
    """Distributions of input, weight and gradient of all measured layers, in both directions, from one batch.

    Of a grouped layer, those of its first group.
    """
    batch = next(iter(start.batches), None)
    if batch is None:  # batches come from an iterator that is used up
        return []
    seen: set[str] = set()
    found: list[Distribution] = []

    def look(operands: BackwardOperands) -> None:
        matrices = operands.matrices()
        if operands.layer in s.layers and operands.layer not in seen and matrices is not None and len(matrices[0]):
            seen.add(operands.layer)
            for tensor, matrix in zip(_TENSORS, matrices, strict=True):
                found.extend(_both_directions(operands.layer, tensor, matrix[:_MOST_ROWS]))

    with borrowed(start.model, skip=start.skip, include=start.include) as lent, observe_backward(look):
        start.loss_fn(lent.model, batch).backward()
    order = {layer: at for at, layer in enumerate(s.layers)}
    return sorted(found, key=lambda one: order[one.layer])


def _both_directions(layer: str, tensor: str, matrix: Tensor) -> list[Distribution]:
    values = matrix.float()
    squares = values.square()
    mean = float(squares.mean())
    statistics = {
        "largest magnitude": float(values.abs().max()),
        "root mean square": mean**0.5,
        "kurtosis": float(squares.square().mean()) / mean**2 if mean else None,
        "zeros": f"{100 * float((values == 0).float().mean()):.2g} %",
    }
    return [
        Distribution(
            layer,
            tensor,
            direction,
            f"blocks of {_BLOCK} by the exponent of their largest number",
            _exponents(operand),
            {**statistics, "largest over root mean square in a block": _crest(operand)},
        )
        for direction, operand in (("rowwise", values), ("columnwise", values.T))
    ]


def _blocks(operand: Tensor) -> Tensor:
    """Blocks along the last dimension [number, 16]; numbers at the end that fill no block are left out."""
    length = min(_BLOCK, operand.shape[-1])
    whole = operand.shape[-1] // length * length
    return operand[:, :whole].reshape(-1, length)


def _exponents(operand: Tensor) -> dict[int, int]:
    largest = _blocks(operand).abs().amax(1)
    exponents = torch.frexp(largest[(largest > 0) & largest.isfinite()]).exponent - 1
    values, counts = exponents.unique(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _crest(operand: Tensor) -> float | None:
    """The largest magnitude of a block over its root mean square, as a mean over blocks: what a scale has to span."""
    blocks = _blocks(operand)
    size = blocks.square().mean(1).sqrt()
    crest = (blocks.abs().amax(1) / size)[size > 0]
    return float(crest.mean()) if len(crest) else None
