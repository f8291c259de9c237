"""Passes over operands: sums over blocks, sums of errors, the rotation. In plain torch, and compiled for the CPU."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...formats import HADAMARD_SIZE
from ...kernels.reference.blocks import blocked
from ...kernels.reference.hadamard import rotate, signs
from .compiled import add, compiled, exponents, rotation, sums


class BlockSums(NamedTuple):
    """What is summed over an operand [R, C] that is divided into blocks.

    Attributes:
        noise: for each block, the sum of the squares of the errors.
        power: for each block, the sum of the squares of the numbers.
        against: the sum of error times number.
        nonzero: how many numbers are not zero.
        lost: how many of them decode to zero.
        cut: how many magnitudes are above the limit, in units of the scale of their block.
    """

    noise: Tensor
    power: Tensor
    against: float
    nonzero: int
    lost: int
    cut: int


def block_sums(
    numbers: Tensor, rounded: Tensor, decoded: Tensor, factors: Tensor, limit: float, block: tuple[int, int]
) -> BlockSums:
    """Compute the sums.

    Args:
        numbers: the operand.
        rounded: the operand as it was rounded, for the last three sums.
        decoded: what it decodes to.
        factors: the scale of each block; one scale for all blocks is [1, 1].
        limit: magnitudes above ``limit`` times the scale are cut off. Under a scale of zero nothing is.
        block: (rows, length) of a block. The last blocks may be smaller.
    """
    compiled = can_compile(numbers)
    return (compiled_sums if compiled else plain_sums)(numbers, rounded, decoded, factors, limit, block)


def plain_sums(
    numbers: Tensor, rounded: Tensor, decoded: Tensor, factors: Tensor, limit: float, block: tuple[int, int]
) -> BlockSums:
    """`block_sums` in torch, for any device."""
    error = decoded - numbers
    there = rounded != 0
    beyond = blocked(rounded.abs(), block) > torch.where(factors > 0, factors * limit, math.inf)[:, None, :, None]
    return BlockSums(
        blocked(error.square(), block).sum(dim=(1, 3), dtype=torch.float64),
        blocked(numbers.square(), block).sum(dim=(1, 3), dtype=torch.float64),
        float((error * numbers).sum(1).sum(dtype=torch.float64)),
        int(torch.count_nonzero(there)),
        int(torch.count_nonzero(there & (decoded == 0))),
        int(torch.count_nonzero(beyond)),
    )


def compiled_sums(
    numbers: Tensor, rounded: Tensor, decoded: Tensor, factors: Tensor, limit: float, block: tuple[int, int]
) -> BlockSums:
    """`block_sums` in one pass over memory, on the CPU."""
    (rows, columns), (high, long) = numbers.shape, block
    noise, power = torch.zeros((2, -(-rows // high), -(-columns // long)), dtype=torch.float64)
    read = [part.contiguous() for part in (numbers, rounded, decoded, factors)]
    found = compiled(sums)(*map(array_of, read), limit, high, long, array_of(noise), array_of(power))
    return BlockSums(noise, power, *found)


# ---- scales ----------------------------------------------------------------------------------------------

LOWEST = -149  # the exponent of the smallest float32 number


def count_exponents(factors: Tensor, power: Tensor) -> tuple[dict[int, int], int, int]:
    """Count positive scales by exponent. Blocks whose ``power`` is zero do not count.

    Returns:
        The counts; the number of all scales that count; and how many of them are zero.
    """
    factors, power = factors.reshape(-1), power.reshape(-1)
    if can_compile(factors):
        counts = np.zeros(128 - LOWEST, dtype=np.int64)
        factors, power = factors.contiguous(), power.contiguous()
        there, zero = compiled(exponents)(array_of(factors), array_of(power), counts)
    else:
        chosen = factors[power > 0]
        there, zero = len(chosen), int((chosen == 0).sum())
        found = torch.frexp(chosen[(chosen > 0) & chosen.isfinite()]).exponent - 1 - LOWEST
        counts = torch.bincount(found.long()).cpu().numpy()
    places = np.flatnonzero(counts)
    return {int(at) + LOWEST: int(counts[at]) for at in places}, there, zero


# ---- draws -----------------------------------------------------------------------------------------------


def add_error(total: Tensor, decoded: Tensor, numbers: Tensor) -> float:
    """Add ``decoded - numbers`` to ``total``, and return the sum of its squares."""
    if can_compile(numbers):
        decoded = decoded.contiguous()
        return float(compiled(add)(*map(array_of, (total, decoded, numbers))))
    error = decoded - numbers
    total += error
    return sum_of_squares(error)


def sum_of_squares(matrix: Tensor) -> float:
    """The sum of all squares."""
    return float(matrix.square().sum(1).sum(dtype=torch.float64))


# ---- the rotation ----------------------------------------------------------------------------------------


def rotated(operand: Tensor, sign_mask: int) -> Tensor:
    """`rotate` of the reference, bit for bit, in one pass over memory on the CPU."""
    if not can_compile(operand):
        return rotate(operand, sign_mask)
    groups, plus_minus = operand.contiguous().view(-1, HADAMARD_SIZE), signs(sign_mask)
    out = torch.empty_like(groups)
    compiled(rotation)(*map(array_of, (groups, plus_minus, out)))
    return out.view(operand.shape)


def can_compile(tensor: Tensor) -> bool:
    """Whether the compiled passes serve a tensor: on the CPU, unless the reference backend is chosen."""
    return tensor.device.type == "cpu" and kernels.get_backend("cpu") == "cpu"


class _Memory:
    """Memory of a tensor, as numpy is told about it."""

    def __init__(self, tensor: Tensor) -> None:
        strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": strides,
            "typestr": _TYPES[tensor.dtype],
        }


_TYPES = {torch.float32: "<f4", torch.float64: "<f8", torch.uint8: "|u1"}


def array_of(tensor: Tensor) -> Any:
    """The numbers of a tensor on the CPU as a numpy array of the same memory, which the caller keeps alive.

    ``tensor.numpy()`` is not used: the storage of the tensor could not be resized any more, and FSDP frees the memory
    of weights in that way.
    """
    return np.asarray(_Memory(tensor))
