"""The tracker of random states, and seeds of stochastic rounding by layer."""

from contextlib import nullcontext

import pytest
import torch
import torch.utils.checkpoint

import crossgrain as cg
from crossgrain import CudaRNGStatesTracker
from crossgrain.runtime.random_numbers import DrawRecord, draw_seed, seed_for_device


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


# ---- draws by layer ------------------------------------------------------------------------------------------

SR = "fprop: nvfp4, dgrad: nvfp4(sr), wgrad: nvfp4(sr)"


class Two(torch.nn.Module):
    """Two layers side by side, so that what one does changes no input and no gradient of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.a(x) + self.b(x)


def gradients(recipe, *, seed=None, recompute=False, steps=2):
    torch.manual_seed(5)
    model, x = Two(), torch.randn(32, 32, requires_grad=True)
    cg.convert(model, recipe)
    found = []
    with nullcontext() if seed is None else cg.draws_by_layer(seed):
        for _ in range(steps):
            x.grad = model.a.weight.grad = model.b.weight.grad = None
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            y.sin().sum().backward()
            found.append((model.a.weight.grad, model.b.weight.grad))
    return found, torch.get_rng_state()


def test_another_format_in_one_layer_leaves_the_draws_of_others():
    # dy of both layers is cos(y), which depends on what fprop of both computes: only backward formats change.
    with_sr, without = f"{SR}; a: {SR}", f"{SR}; a: fprop: nvfp4, dgrad: hp, wgrad: hp"
    for (a1, b1), (a2, b2) in zip(gradients(with_sr, seed=1)[0], gradients(without, seed=1)[0], strict=True):
        assert torch.equal(b1, b2) and not torch.equal(a1, a2)
    first, second = gradients(with_sr)[0][1][1], gradients(without)[0][1][1]
    assert not torch.equal(first, second)  # from torch's generator, the draws of b are others


def test_draws_by_layer_differ_by_call_and_by_seed_and_are_repeated():
    one, again, other = (gradients(SR, seed=seed)[0] for seed in (1, 1, 2))
    assert not torch.equal(one[0][1], one[1][1])  # the second step draws anew
    assert all(torch.equal(a, b) for x, y in zip(one, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(one[0][1], other[0][1])


def test_draws_by_layer_leave_torchs_generator_alone():
    torch.manual_seed(5)
    Two(), torch.randn(32, 32)
    untouched = torch.get_rng_state()
    assert torch.equal(gradients(SR, seed=1)[1], untouched)
    assert not torch.equal(gradients(SR)[1], untouched)


def test_a_recomputation_draws_the_same_by_layer_and_shifts_nothing():
    recipe = "fprop: nvfp4, fprop.input: nvfp4(sr), dgrad: nvfp4(sr), wgrad: nvfp4(sr)"
    plain, recomputed = gradients(recipe, seed=1)[0], gradients(recipe, seed=1, recompute=True)[0]
    assert all(torch.equal(a, b) for x, y in zip(plain, recomputed, strict=True) for a, b in zip(x, y, strict=True))


def test_draws_by_layer_end_with_their_context_also_after_an_error():
    expected = gradients(SR)[0][0][1]
    with pytest.raises(ZeroDivisionError), cg.draws_by_layer(0), cg.draws_by_layer(1):
        raise ZeroDivisionError
    assert torch.equal(gradients(SR)[0][0][1], expected)


# ---- recorded draws ------------------------------------------------------------------------------------------


def recorded(recipe, context, recompute=False):
    with context:
        return gradients(recipe, recompute=recompute)


def same(one, other):
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_recording_draws_changes_nothing():
    record = DrawRecord()
    (found, state), (plain, untouched) = recorded(SR, record.recording()), gradients(SR)
    assert same(found, plain) and torch.equal(state, untouched)
    assert record.count == 2 * 2  # of the gradient of each layer, in each of two steps


@pytest.mark.parametrize("recompute", [False, True])
def test_recorded_draws_are_repeated_also_if_another_layer_draws_less(recompute):
    # dy of both layers is cos(y), which depends on what fprop of both computes: only backward formats change.
    without = f"{SR}; a: fprop: nvfp4, dgrad: hp, wgrad: hp"
    record = DrawRecord()
    found, state = recorded(SR, record.recording(), recompute)
    again, after = recorded(SR, record.repeating(), recompute)
    assert same(found, again) and torch.equal(state, after)
    for (a1, b1), (a2, b2) in zip(found, recorded(without, record.repeating(), recompute)[0], strict=True):
        assert torch.equal(b1, b2) and not torch.equal(a1, a2)
    assert not torch.equal(found[1][1], gradients(without, recompute=recompute)[0][1][1])


def test_a_recomputation_takes_the_repeated_seed_of_the_first_pass():
    recipe = "fprop: nvfp4, fprop.input: nvfp4(sr), dgrad: nvfp4, wgrad: nvfp4, wgrad.input: nvfp4(sr)"
    record = DrawRecord()
    found = recorded(recipe, record.recording())[0]
    assert same(found, recorded(recipe, record.repeating(), recompute=True)[0])


def test_recorded_draws_that_run_out_are_drawn_as_usual():
    record = DrawRecord()
    with record.recording():
        torch.manual_seed(0)
        first = draw_seed("a")
    with record.repeating():
        torch.manual_seed(1)
        drawn = [draw_seed("a"), draw_seed("a"), draw_seed("b")]
    torch.manual_seed(1)
    assert drawn == [first, *[draw_seed() for _ in range(3)][1:]]


def test_variants_of_recorded_draws_differ_and_leave_torchs_generator_as_it_was():
    record = DrawRecord()
    found, state = recorded(SR, record.recording())
    (one, after), (again, _), (other, _) = (recorded(SR, record.repeating(variant)) for variant in (1, 1, 2))
    assert same(one, again) and torch.equal(state, after)
    assert not same(one, found) and not same(one, other)


class _Gpu:
    """A generator of the CPU in place of that of a GPU."""

    def __init__(self, monkeypatch):
        self.generator = torch.Generator().manual_seed(99)
        functions = {
            "is_available": lambda: True,
            "get_rng_state": self.generator.get_state,
            "set_rng_state": self.generator.set_state,
            "manual_seed": self.generator.manual_seed,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def rand(self):
        return torch.rand(3, generator=self.generator)


def test_forks_also_switch_the_generator_of_a_gpu(monkeypatch):
    gpu = _Gpu(monkeypatch)
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    outside = gpu.generator.get_state()
    drawn = []
    for _ in range(2):
        with tracker.fork("a"):
            drawn.append(gpu.rand())
            saved = tracker.get_states()
    assert torch.equal(gpu.generator.get_state(), outside)
    assert torch.equal(torch.cat(drawn), torch.rand(6, generator=torch.Generator().manual_seed(1)))
    tracker.set_states(saved)  # as they were before the last fork ended
    with tracker.fork("a"):
        assert torch.equal(gpu.rand(), drawn[1])


def test_states_without_a_gpu_are_refused_on_one(monkeypatch):
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    states = tracker.get_states()
    _Gpu(monkeypatch)
    with pytest.raises(ValueError, match="the random state 'a' was made without a GPU"):
        tracker.set_states(states)


def test_the_seed_for_a_device_is_the_seed():
    for seed in (0, -(2**63), 2**63 - 1):
        tensor = seed_for_device(seed, torch.device("cpu"))
        assert tensor.dtype == torch.int64 and tensor.tolist() == [seed]
