"""The compiled passes give what plain torch gives."""

import numpy as np
import pytest
import torch

from crossgrain.kernels.choice import using_backend
from crossgrain.kernels.reference.hadamard import rotate
from crossgrain.lab.inspect.passes import (
    add_error,
    array_of,
    block_sums,
    compiled_sums,
    count_exponents,
    plain_sums,
    rotated,
)


def operands(rows=70, columns=100):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x[3], x[:, 5] = 0.0, 0.0
    decoded = x + 0.1 * torch.randn(rows, columns, generator=generator)
    decoded[x.abs() < 0.2] = 0.0
    return x, decoded


@pytest.mark.parametrize("block", [(1, 16), (1, 32), (16, 16), (128, 128), (1, 7)])
def test_sums_over_blocks(block):
    x, decoded = operands()
    grid = (-(-70 // block[0]), -(-100 // block[1]))
    factors = torch.rand(grid, generator=torch.Generator().manual_seed(1))
    factors[0, 0] = 0.0
    rounded = x.bfloat16().float()
    found, expected = (sums(x, rounded, decoded, factors, 3.0, block) for sums in (compiled_sums, plain_sums))
    torch.testing.assert_close(found.noise, expected.noise, rtol=1e-5, atol=1e-6)  # added in another order
    torch.testing.assert_close(found.power, expected.power, rtol=1e-5, atol=1e-6)
    assert found.against == pytest.approx(expected.against, rel=1e-5)
    assert found[3:] == expected[3:] and found.lost > 0 and (found.cut > 0 or block[0] == 128)


def test_one_scale_serves_all_blocks():
    x, decoded = operands()
    factor = torch.tensor([[0.5]])
    found, expected = (sums(x, x, decoded, factor, 3.0, (1, 32)) for sums in (compiled_sums, plain_sums))
    assert found.cut == expected.cut == int((x.abs() > 1.5).sum())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_scales_are_counted_by_exponent(backend):
    factors = torch.tensor([[1.0, 1.5, 2.0, 0.0, 2.0**-149], [float("nan"), float("inf"), 0.0, 3.0, 2.0**-126]])
    power = torch.ones(2, 5, dtype=torch.float64)
    power[0, 0] = 0
    with using_backend(backend):
        counts, there, zero = count_exponents(factors, power)
    assert counts == {-149: 1, -126: 1, 0: 1, 1: 2} and (there, zero) == (9, 2)


def test_the_rotation_has_the_bits_of_the_reference():
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(2))
    for mask in (0xD7E8, 0):
        assert torch.equal(rotated(x, mask), rotate(x, mask))


def test_errors_are_added():
    x, decoded = operands()
    for backend in ("cpu", "reference"):
        with using_backend(backend):
            total = torch.ones_like(x)
            squares = add_error(total, decoded, x)
        assert torch.equal(total, 1 + (decoded - x))
        assert squares == pytest.approx((decoded - x).double().square().sum().item(), rel=1e-6)


def test_memory_that_was_read_can_still_be_freed_as_fsdp_does_it():
    x, decoded = operands(64, 64)
    factors = torch.ones(64, 2)
    tensors = [x, decoded, factors]
    compiled_sums(x, x, decoded, factors, 1.0, (1, 32))
    count_exponents(factors, torch.ones(64, 2, dtype=torch.float64))
    rotated(x, 0)
    add_error(torch.zeros_like(x), decoded, x)
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)
    assert np.array_equal(array_of(x.t()[3:]), x.numpy().T[3:])


def test_the_reference_backend_uses_no_compiled_pass(monkeypatch):
    from crossgrain.lab.inspect import passes

    monkeypatch.setattr(passes, "compiled", None)
    x, decoded = operands()
    with using_backend("reference"):
        block_sums(x, x, decoded, torch.tensor([[1.5]]), 1.0, (1, 32))
        rotated(x[:, :96], 0)
