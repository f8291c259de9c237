"""Bias apart from variance: round the same numbers several times with other random numbers.

Noise that stochastic rounding adds is different in each step and averages out. What is left of the mean over many draws
is the same in each step, and accumulates. Rounding is a function of seed, plane and position, so the draws here can be
repeated exactly, and draw nothing from the generator of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import kernels
from ...formats.encoding import Encoding
from ...planes import Direction
from .encode import Given, encoded
from .passes import add_error, sum_of_squares
from .statistics import Operand


@dataclass(frozen=True)
class BiasAndNoise:
    """The two parts of the error, each as a norm over the norm of the tensor.

    ``bias² + noise²`` is the expected square of the relative error.

    Attributes:
        bias: the error of the mean over draws, without what the finite number of draws leaves of the noise.
        noise: the standard deviation over draws.
    """

    bias: float | None
    noise: float


def bias_and_noise(
    operand: Operand, sample: Tensor, encoding: Encoding, direction: Direction, given: Given, draws: int
) -> BiasAndNoise:
    """Round a matrix stochastically with the seeds 0, 1, ... ``draws - 1``.

    Args:
        operand: the matrix as an operand.
        sample: the matrix.
        encoding: the encoding, which rounds stochastically.
        direction: the direction of the plane.
        given: amax and scale.
        draws: the number of draws, at least 2.
    """
    numbers = operand.numbers
    power = sum_of_squares(numbers)
    finite = math.isfinite(power)
    if not finite:
        numbers = torch.where(numbers.isfinite(), numbers, 0.0)
        power = sum_of_squares(numbers)
    if not power:
        return BiasAndNoise(None, 0.0)
    total, squares = torch.zeros_like(numbers), 0.0
    for seed in range(draws):
        decoded = kernels.decode_operand(encoded(sample, encoding, direction, given, seed))
        if operand.unit != 1.0:
            decoded = decoded * operand.unit
        if not finite:  # NaNs and infinities have no part in the errors
            decoded = torch.where(operand.numbers.isfinite() & decoded.isfinite(), decoded, numbers)
        squares += add_error(total, decoded, numbers)
    mean = sum_of_squares(total) / draws**2
    variance = (squares - draws * mean) / (draws - 1)
    return BiasAndNoise(math.sqrt(max(0.0, mean - variance / draws) / power), math.sqrt(max(0.0, variance) / power))
