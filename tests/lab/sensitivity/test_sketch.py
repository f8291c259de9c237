"""Sketches keep inner products, and what follows from these."""

import math

import pytest
import torch

from crossgrain.lab.sensitivity.sketch import Sketches, batch_variance, common_part, inner_products


def sketched(vectors, places=1 << 12):
    sketches, found = Sketches(places), []
    for vector in vectors:
        sketch = sketches.empty(vector.device)
        sketches.add(sketch, "a", vector[:30_000])
        sketches.add(sketch, "b", vector[30_000:])
        found.append(sketch)
    return found


def test_inner_products_are_kept():
    vectors = [torch.randn(50_001) + 0.5 for _ in range(3)]
    exact = torch.stack(vectors).double() @ torch.stack(vectors).double().T
    found = inner_products(sketched(vectors))
    assert ((found - exact).abs() / exact.diagonal().mean()).max() < 5 * math.sqrt(
        2 / (1 << 12)
    )  # 5 standard deviations


def test_small_tensors_keep_their_places():
    sketches = Sketches(16)
    sketch = sketches.empty(torch.device("cpu"))
    sketches.add(sketch, "a", torch.arange(1.0, 6.0))
    assert torch.equal(sketch.abs(), torch.tensor([1.0, 2, 3, 4, 5] + 11 * [0]))


def test_what_batches_have_in_common_is_found_without_bias():
    torch.manual_seed(0)
    common = 0.3 * torch.ones(1000, dtype=torch.float64)
    vectors = torch.stack([common + torch.randn(1000, dtype=torch.float64) for _ in range(40)])
    found = common_part(vectors @ vectors.T)
    assert found.low < 90 < found.high and found.mean == pytest.approx(90, abs=5)
    nothing = torch.randn(40, 1000, dtype=torch.float64)
    found = common_part(nothing @ nothing.T)
    assert found.low < 0 < found.high and abs(found.mean) < 5


def test_two_batches_say_nothing_about_the_spread_and_one_says_nothing():
    found = common_part(torch.eye(2, dtype=torch.float64) + 1)
    assert found.mean == 1 and math.isinf(found.low)
    with pytest.raises(ValueError, match="at least two batches"):
        common_part(torch.ones(1, 1, dtype=torch.float64))


def test_the_variance_of_a_batch():
    torch.manual_seed(0)
    vectors = [torch.ones(4096) + 2 * torch.randn(4096) for _ in range(30)]
    squares = [float(vector.square().sum()) for vector in vectors]
    assert batch_variance(squares, vectors) == pytest.approx(4 * 4096, rel=0.02)
