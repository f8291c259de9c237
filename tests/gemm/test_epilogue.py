"""The epilogue of GEMMs: its definition, written again with numbers of numpy, and the end of the CPU's GEMMs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.gemm import product as cpu
from crossgrain.kernels import GlobalScale

R, C = 6, 5
SCALES = {
    "none": None,
    "single": lambda n: GlobalScale(torch.rand(1) * 3, 1.0),
    "amax": lambda n: GlobalScale(torch.rand(1) * 3000, 1.0 / 2688.0),
    "vector": lambda n: GlobalScale(torch.rand(n) * 3000, 1.0 / 2688.0),
}
F32, F64 = np.float32, np.float64


def scale(kind, size):
    make = SCALES[kind]
    return None if make is None else make(size)


def wide(given):
    """A scale in float64: a number, or a vector."""
    if given is None:
        return F64(1)
    values = given.values.numpy().astype(F64) * F64(given.factor)
    return values[0] if values.size == 1 else values


def defined(product, start, row, column, alpha, bias, beta):
    """The definition in the docstring of `epilogue`, in numpy, before the last rounding."""
    p, r, c, alpha = product.numpy(), wide(row), wide(column), F64(alpha)
    if r.ndim == 0 and c.ndim == 0:
        together = (alpha * r) * c
        fits = abs(together) <= np.finfo(F32).max
        factors = (F32(together), F32(1)) if fits else (F32(alpha * r), F32(c))
        p = (p * factors[0]) * factors[1]
    elif c.ndim == 0:
        p = p * ((r * c) * alpha).astype(F32)[:, None]
    elif r.ndim == 0:
        p = p * ((c * r) * alpha).astype(F32)[None, :]
    else:
        p = (p * (r * alpha).astype(F32)[:, None]) * c.astype(F32)[None, :]
    if beta is not None:
        p = start.float().numpy() * F32(beta) + p
    if bias is not None:
        p = p + bias.float().numpy()
    assert p.dtype == F32
    return torch.from_numpy(np.ascontiguousarray(p))


@pytest.mark.parametrize(("row", "column"), list(itertools.product(SCALES, repeat=2)))
def test_it_is_what_its_definition_says(row, column):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for alpha, beta, dtype, with_bias in itertools.product((1.0, 0.3), (None, 0.7), dtypes, (None, torch.bfloat16)):
        product, start = torch.randn(R, C), torch.randn(R, C).to(dtype)
        scales = scale(row, R), scale(column, C)
        bias = None if with_bias is None else torch.randn(C).to(with_bias)
        expected = defined(product.clone(), start, *scales, alpha, bias, beta).to(dtype)
        out = start.clone()
        kernels.epilogue(product, out, *scales, alpha, bias, beta)
        assert torch.equal(out, expected), (alpha, beta, dtype, with_bias)


def test_it_writes_to_strided_memory_and_in_place():
    product, bias = torch.randn(R, C), torch.randn(C)
    expected = product * 0.5 + bias
    for out in (torch.zeros(C, R).t(), torch.zeros(R, 2 * C)[:, ::2], product):
        kernels.epilogue(product.clone() if out is not product else product, out, alpha=0.5, bias=bias)
        assert torch.equal(out, expected)


def test_zero_stays_zero_and_the_rest_becomes_infinite_under_scales_beyond_fp32():
    huge = GlobalScale(torch.tensor([1e30]), 1.0)
    product = torch.tensor([[0.0, 1.0]])
    kernels.epilogue(product, product, huge, huge)
    assert product.tolist() == [[0.0, float("inf")]]
    assert kernels.joint_scale(huge, huge, 2.0, product).tolist() == torch.tensor([2e30, 1e30]).tolist()


def test_two_scales_are_rounded_once_together():
    """Rounded one by one they would give another number."""
    third, seventh = (GlobalScale(torch.tensor([1.0]), 1.0 / n) for n in (3.0, 7.0))
    joint = kernels.joint_scale(third, seventh, 1.0, torch.zeros(1))
    assert joint.tolist() == [float(np.float32(1 / 3 * (1 / 7))), 1.0]
    assert joint[0] != torch.tensor(1 / 3) * torch.tensor(1 / 7)
    for broken in (float("inf"), float("nan")):
        scale = GlobalScale(torch.tensor([broken]), 1.0)
        assert not kernels.joint_scale(scale, third, 1.0, torch.zeros(1))[0].isfinite()


def on_cpu(product, start, row, column, alpha, bias, beta):
    """The end of the CPU's GEMMs (`gemm.product`), with a product that is there already."""
    total, row, column = start.clone(), *(1.0 if s is None else cpu._number(s.values, s.factor) for s in (row, column))
    factor = cpu.one_factor(row, column, alpha)
    if factor is None:
        cpu._scale_by_vectors(product, row, column, alpha)
    cpu.finish(product, 1.0 if factor is None else factor, total, bias, beta)
    return total


@pytest.mark.parametrize(("row", "column"), list(itertools.product(SCALES, repeat=2)))
def test_the_cpu_ends_its_gemms_with_the_same_bits(row, column):
    for alpha, beta, with_bias in itertools.product((1.0, 0.3), (None, 0.7), (False, True)):
        scales = scale(row, R), scale(column, C)
        if with_bias and beta is None:  # where a CPU may fuse factor and bias: with a power of two it cannot be seen
            alpha = 1.0
            scales = tuple(s and (s if not s.is_single else GlobalScale(torch.tensor([0.25]), 1.0)) for s in scales)
        product, start = torch.randn(R, C), torch.randn(R, C)
        bias = torch.randn(C) if with_bias else None
        expected = on_cpu(product.clone(), start, *scales, alpha, bias, beta)
        out = start.clone()
        kernels.epilogue(product, out, *scales, alpha, bias, beta)
        assert torch.equal(out, expected), (alpha, beta, with_bias)
