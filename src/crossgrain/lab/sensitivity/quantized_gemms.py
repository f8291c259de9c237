"""What GEMMs give in other formats, from operands in high precision."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import kernels
from ...linear.padding import Sizes, padded_matrix, padding_for
from ...planes import COLUMNWISE, ROWWISE, Direction
from ...quantizers.base import Quantizer


class QuantizedOperands:
    """x, W and dy of one call of a layer, decoded as its GEMMs would read them.

    Args:
        quantizers: those of the layer, by tensor.
        x: the input [M, K].
        weight: the weight [N, K].
        dy: the gradient of the output [M, N].
    """

    def __init__(self, quantizers: dict[str, Quantizer], x: Tensor, weight: Tensor, dy: Tensor) -> None:
        self._matrices = {"input": x, "weight": weight, "grad_output": dy}
        self._quantizers = quantizers
        padding = padding_for(quantizers["input"], quantizers["weight"], quantizers["grad_output"])
        self._padded = padding.padded(Sizes(x.shape[0], x.shape[1], dy.shape[1]), backward=True)

    def _read(self, tensor: str, direction: Direction) -> Tensor:
        m, k, n = self._padded
        rows, columns = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}[tensor]
        matrix = self._matrices[tensor]
        made = self._quantizers[tensor].make_planes(
            padded_matrix(matrix, rows, columns), rowwise=direction is ROWWISE, columnwise=direction is COLUMNWISE
        )
        plane = made.plane(direction)
        assert plane is not None
        decoded = kernels.decode(plane, torch.float32)
        return decoded[: matrix.shape[0], : matrix.shape[1]].to(matrix.dtype)

    def fprop(self) -> Tensor:
        """y in the formats [M, N]."""
        return self._read("input", ROWWISE) @ self._read("weight", ROWWISE).T

    def wgrad(self) -> Tensor:
        """dW in the formats [N, K]."""
        return self._read("grad_output", COLUMNWISE).T @ self._read("input", COLUMNWISE)
