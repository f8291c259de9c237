"""Matrices that are hard to quantize, and the ways in which they can lie in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_SPECIAL = (0.0, -0.0, 1e-40, -1e-42, 1.17e-38, 448.0, -448.0, 464.0, 6.0, -6.0, 5.0, 2.5, 57344.0, 1e-20, -1e-30, 0.25)
_AROUND = 3e38  # what lies around a matrix that is a part of a larger one; an amax that counts it would be this


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _mixed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Many sizes of numbers; zeros, NaNs and subnormal numbers alone, and as whole rows and blocks of columns."""
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    flat = x.view(-1)
    places = torch.randperm(flat.numel(), generator=generator)
    for number, place in zip((*_SPECIAL, math.nan, -math.nan), places, strict=False):
        flat[place] = number
    matrix = x.view(-1, x.shape[-1]) if x.dim() and x.numel() else x.reshape(1, -1)
    for place, number in enumerate((0.0, math.nan, 3e-40)):
        matrix[32 * place : 32 * place + 32, :16] = number
        matrix[128 + place : 129 + place] = number
    return x


def _infinite(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    x.view(-1)[:: max(1, x.numel() // 13)] = math.inf
    x.view(-1)[7 :: max(1, x.numel() // 5)] = -math.inf
    return x


def _ties(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Few bits of mantissa, so that many numbers lie halfway between two numbers of an element."""
    digits = torch.randint(-32, 33, shape, generator=generator).float()
    return digits * torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())


def _patterns(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator).view(torch.float32)


def _zeros(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, -0.0)


NUMBERS: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "normal": _normal,
    "mixed": _mixed,
    "infinite": _infinite,
    "ties": _ties,
    "patterns": _patterns,
    "zeros": _zeros,
    "nans": lambda shape, generator: torch.full(shape, math.nan),
    "subnormal": lambda shape, generator: _normal(shape, generator) * 1e-41,
    "small": lambda shape, generator: _normal(shape, generator) * 2e-38,
    "huge": lambda shape, generator: _normal(shape, generator) * 8e37,
    "spread": lambda shape, generator: _normal(shape, generator) * torch.logspace(-35, 35, shape[-1]),
}


def _part_of_rows(x: Tensor) -> Tensor:
    """Rows are longer than the matrix is wide."""
    whole = torch.full((*x.shape[:-1], x.shape[-1] + 8), _AROUND).to(x.dtype)
    whole[..., 4:-4] = x
    return whole[..., 4:-4]


def _every_second_column(x: Tensor) -> Tensor:
    whole = torch.full((*x.shape[:-1], 2 * x.shape[-1]), _AROUND).to(x.dtype)
    whole[..., ::2] = x
    return whole[..., ::2]


def _at_an_odd_place(x: Tensor) -> Tensor:
    """Contiguous, but it begins in the middle of memory, one number behind a multiple of 16 bytes."""
    whole = torch.full((x.numel() + 32,), _AROUND).to(x.dtype)
    part = whole[17 : 17 + x.numel()].view(x.shape)
    return part.copy_(x)


def _negated_later(x: Tensor) -> Tensor:
    """Memory has the other sign: torch negates such a tensor when it is read."""
    pair = torch.stack((torch.zeros_like(x), -x), dim=-1)
    lazy = torch.view_as_complex(pair).conj().imag
    assert lazy.is_neg()
    return lazy


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "part of rows": _part_of_rows,
    "every second column": _every_second_column,
    "transposed": lambda x: x.t().contiguous().t(),
    "at an odd place": _at_an_odd_place,
    "the same row": lambda x: x[:1].expand(x.shape),
    "the same column": lambda x: x[:, :1].expand(x.shape),
    "negated later": _negated_later,
}


@lru_cache(maxsize=256)
def matrix(numbers: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> Tensor:
    """Numbers by name, the same in every process. Nobody writes to them."""
    generator = torch.Generator().manual_seed(len(numbers) + 100 * len(shape) + math.prod(shape))
    return LAYOUTS[layout](NUMBERS[numbers](shape, generator).to(dtype))
