"""The tracker of random states."""

import pytest
import torch

from crossgrain import CudaRNGStatesTracker


def test_forks_go_on_where_they_ended_and_leave_no_trace():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    torch.manual_seed(0)
    outside = torch.get_rng_state()
    drawn = {}
    for name in ("a", "b", "a"):
        with tracker.fork(name):
            drawn.setdefault(name, []).append(torch.rand(3))
    assert torch.equal(torch.get_rng_state(), outside)
    torch.manual_seed(1)
    assert torch.equal(torch.cat(drawn["a"]), torch.rand(6))
    torch.manual_seed(2)
    assert torch.equal(drawn["b"][0], torch.rand(3))


def test_states_can_be_saved_and_an_error_inside_restores():
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    states, outside = tracker.get_states(), torch.get_rng_state()
    first = []

    def draw_and_stop():
        first.append(torch.rand(2))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), tracker.fork():
        draw_and_stop()
    assert torch.equal(torch.get_rng_state(), outside)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(2), first[0])


def test_errors():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="the seed 1 was already added"):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="the name 'a' was already added"):
        tracker.add("a", 2)
    with pytest.raises(KeyError, match="no state 'c'; available: a"), tracker.fork("c"):
        pass
    tracker.reset()
    tracker.add("a", 1)
    assert list(tracker.get_states()) == ["a"]
