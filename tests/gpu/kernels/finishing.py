"""The ends of GEMMs to try backends on: scales, factors, biases, what is added, and layouts of the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from crossgrain.kernels import REFERENCE, Backend, GlobalScale

from .agreement import assert_same, guarded

_EXTREME = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-40, 65519.0, 65520.0, -1e-8])


@dataclass(frozen=True)
class End:
    """The end of a GEMM.

    Attributes:
        row: "none", "single" or "each": what scale the first operand has.
        column: what scale the second operand has.
        size: the size of the numbers of both scales.
        alpha: multiplies the product.
        beta: multiplies what was there before.
        bias: dtype of the bias; None for none.
        dtype: dtype of the result.
        shape: its shape.
        turned: the result is stored transposed, and the product is a part of something wider.
        in_place: the result is written over the product.
    """

    row: str = "none"
    column: str = "none"
    size: float = 1.0
    alpha: float = 1.0
    beta: float | None = None
    bias: torch.dtype | None = None
    dtype: torch.dtype = torch.bfloat16
    shape: tuple[int, int] = (19, 70)
    turned: bool = False
    in_place: bool = False

    def __str__(self) -> str:
        told = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        return ", ".join(f"{name} {value}" for name, value, default in told if value != default) or "nothing to do"


def _ends() -> Iterator[End]:
    kinds, dtypes = ("none", "single", "each"), (torch.bfloat16, torch.float16, torch.float32)
    for number, (row, column) in enumerate(itertools.product(kinds, kinds)):
        dtype = dtypes[number % 3]
        yield End(row, column, alpha=0.3, bias=torch.bfloat16, dtype=dtype)
        yield End(row, column, alpha=1e30, beta=0.7, dtype=dtypes[(number + 1) % 3])
        yield End(row, column, 1e30, alpha=1e20, dtype=dtype)  # beyond fp32 together, but not one by one
        yield End(row, column, 1e-30, alpha=-1.0, bias=torch.float32, beta=1.0, turned=True, dtype=dtype)
    yield End()
    yield End(dtype=torch.float32)
    yield End(dtype=torch.float32, in_place=True, row="single")
    yield End(dtype=torch.float32, in_place=True, row="each", column="each", bias=torch.float16)
    yield End(alpha=math.inf, row="single")
    yield End(alpha=math.nan, column="each", dtype=torch.float32)
    yield End(alpha=0.0, size=3e38, row="single", column="single")
    yield End(beta=1e39, dtype=torch.float32)
    yield End(beta=-0.0, bias=torch.float64, dtype=torch.float32)
    yield End(shape=(1, 1), row="each", column="each")
    yield End(shape=(0, 5), row="each")
    yield End(shape=(17, 513), column="each", bias=torch.bfloat16, dtype=torch.float16)


ENDS = tuple(_ends())
QUICK_ENDS = (ENDS[0], ENDS[18], ENDS[33], ENDS[35], ENDS[38])


def check_end(backend: Backend, end: End) -> None:
    """Assert that a backend finishes a GEMM as the reference does, and writes nothing else."""
    mine, theirs = (_finished(each, end) for each in (backend, REFERENCE))
    assert_same(mine, theirs, f"the result of {end}, with what lies around it")
    if end.row != "each" and end.column != "each":
        generator = torch.Generator().manual_seed(1)
        scales = [_scale(kind, 1, end, generator) for kind in (end.row, end.column)]
        like = torch.empty(0)
        factors = backend.joint_scale(scales[0], scales[1], end.alpha, like)
        assert_same(factors, REFERENCE.joint_scale(scales[0], scales[1], end.alpha, like), "joint scale")


def _finished(backend: Backend, end: End) -> Tensor:
    """The memory in which a backend has written the result."""
    rows, columns = end.shape
    generator = torch.Generator().manual_seed(rows + columns)
    memory, out = guarded(end.shape[::-1] if end.turned else end.shape, end.dtype, 64)
    out = out.t() if end.turned else out
    product = torch.randn(rows, columns + 3, generator=generator)
    product.view(-1)[: len(_EXTREME)] = _EXTREME[: product.numel()]
    product = product[:, :columns] if end.turned else product[:, :columns].contiguous()
    out.copy_(torch.randn(end.shape, generator=generator))
    if end.in_place:
        out.copy_(product)
        product = out
    bias = None if end.bias is None else torch.randn(2 * columns, generator=generator).to(end.bias)[::2]
    scales = [_scale(kind, n, end, generator) for kind, n in ((end.row, rows), (end.column, columns))]
    backend.epilogue(product, out, scales[0], scales[1], end.alpha, bias, end.beta)
    return memory.view(end.dtype)


def _scale(kind: str, count: int, end: End, generator: torch.Generator) -> GlobalScale | None:
    if kind == "none":
        return None
    values = (torch.rand(1 if kind == "single" else count, generator=generator) + 0.5) * end.size
    return GlobalScale(values, 1 / 2688)
