"""Numbers between host and device, here on the CPU; tests/gpu/fake_cuda has a device that can be waited for."""

import pytest
import torch

from crossgrain.runtime.host_and_device import number_on, on_device, require, tell_later

CPU = torch.device("cpu")


def test_numbers_of_the_host():
    assert torch.equal(on_device([1, -2], CPU), torch.tensor([1, -2]))
    assert on_device([-(2**63)], CPU, torch.int64).tolist() == [-(2**63)]
    assert on_device([0.5], CPU).dtype == torch.float32


def test_one_number_moves_with_its_shape_and_dtype():
    moved = number_on(torch.full((1,), 3.0, dtype=torch.float32), torch.device("meta"))
    assert moved.shape == (1,) and moved.dtype == torch.float32 and moved.is_meta


def test_a_rule_that_is_broken_raises_with_its_details():
    require(torch.tensor(True), "x > 0", lambda: pytest.fail("nothing is wrong"))
    with pytest.raises(ValueError, match="x is -1"):
        require(torch.tensor([False]), "x > 0", lambda: "x is -1")
    with pytest.raises(RuntimeError, match="x is -1"):
        require(torch.tensor(False), "x > 0", lambda: "x is -1", RuntimeError)


def test_numbers_of_the_cpu_are_told_at_once():
    told = []
    tell_later(torch.tensor(1.5), told.append)
    assert told == [1.5]
