"""When the steps of delayed scaling end: forward with the outermost autocast, backward with the pass."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.checkpoint import checkpoint

from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    FP8GlobalStateManager,
    MXFP8BlockScaling,
    QuantizerRole,
    RecipeState,
    active,
    autocast,
    backward_note,
    forward_step,
)
from crossgrain.recipe.updates import _EndOfPass, backward_steps

RECIPE = DelayedScaling(amax_history_len=4)


class Probe(torch.nn.Module):
    """A module with one tensor in each pass: it quantizes its input and the gradient."""

    def __init__(self, recipe=RECIPE):
        super().__init__()
        self.forward_state = RecipeState.create(recipe, mode="forward", roles=[QuantizerRole("linear", "input")])
        self.backward_state = RecipeState.create(
            recipe, mode="backward", roles=[QuantizerRole("linear", "grad_output")]
        )
        self.quantizer = self.forward_state.make_quantizers()[0]
        self.grad_quantizer = self.backward_state.make_quantizers()[0]

    def forward(self, x):
        if active().enabled or active().calibrating:
            with forward_step(self.forward_state):
                self.quantizer.calibrate(x.detach())
        return ProbeFunction.apply(x, self, backward_note(self.backward_state))

    def scales(self):
        return self.forward_state.delayed.scale.item(), self.backward_state.delayed.scale.item()

    def seen(self):
        return self.forward_state.delayed.amax_history[0].item(), self.backward_state.delayed.amax_history[0].item()


class ProbeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probe, note):
        ctx.probe, ctx.note = probe, note
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        ctx.probe.grad_quantizer.calibrate(grad)
        return grad, None, None


def tensor(value=2.0):
    return torch.full((4, 4), value, requires_grad=True)


FORWARD, BACKWARD = 224.0, 57344.0  # for an input of 2 and a gradient of 1


def test_forward_ends_with_the_outermost_enabled_level():
    probe = Probe()
    with autocast(enabled=False):
        with autocast(recipe=RECIPE):
            with autocast(recipe=RECIPE):
                probe(tensor())
            assert probe.scales() == (1.0, 1.0) and probe.seen() == (2.0, 0.0)
            with autocast(enabled=False):
                pass
            assert probe.scales() == (1.0, 1.0)
        assert probe.scales() == (FORWARD, 1.0) and probe.seen() == (0.0, 0.0)
    with autocast(recipe=RECIPE):
        pass
    assert probe.forward_state.amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0], "it did not run in this one"


def test_backward_ends_with_the_pass():
    first, second = Probe(), Probe()
    x, during = tensor(), []
    with autocast(recipe=RECIPE):
        y = first(x)
        y.register_hook(lambda grad: during.append(second.scales()[1]))
        loss = second(y).sum()
    loss.backward()
    assert during == [1.0], "not before the whole pass is done"
    assert first.scales() == second.scales() == (FORWARD, BACKWARD)
    assert not backward_steps._steps


def test_backward_ends_also_where_the_first_module_has_none():
    """The input needs no gradient, so the first module's backward never runs."""
    first, second = Probe(), Probe()
    with autocast(recipe=RECIPE):
        loss = (second(first(torch.ones(4, 4)) * tensor())).sum()
    loss.backward()
    assert first.scales()[1] == 1.0
    assert second.scales()[1] == BACKWARD


def test_every_backward_pass_is_a_step():
    probe = Probe()
    for value in (1.0, 4.0):
        with autocast(recipe=RECIPE):
            loss = probe(tensor()).sum() * value
        loss.backward()
    assert probe.backward_state.amax_history[:, 0].tolist() == [0.0, 0.0, 1.0, 4.0]


def test_validation_leaves_no_trace():
    trained, also_validated = Probe(), Probe()
    for _ in range(3):
        for probe in (trained, also_validated):
            with autocast(recipe=RECIPE):
                loss = probe(tensor()).sum()
            loss.backward()
        with torch.no_grad(), autocast(recipe=RECIPE):
            also_validated(tensor(100.0))
        with torch.inference_mode(), autocast(recipe=RECIPE):
            also_validated(tensor(200.0).detach())
    assert trained.scales() == also_validated.scales()
    assert torch.equal(trained.forward_state.amax_history, also_validated.forward_state.amax_history)


def test_grad_mode_counts_where_the_level_ends():
    """Reentrant checkpointing runs its first pass without gradients."""
    probe = Probe()
    with autocast(recipe=RECIPE), torch.no_grad():
        probe(tensor())
    assert probe.scales()[0] == FORWARD


@pytest.mark.parametrize("where", ["outer", "inner"])
def test_a_failed_step_leaves_no_trace(where):
    probe = Probe()

    def fail():
        probe(tensor())
        raise ZeroDivisionError

    if where == "outer":
        with pytest.raises(ZeroDivisionError), autocast(recipe=RECIPE):
            fail()
    else:
        with autocast(recipe=RECIPE), pytest.raises(ZeroDivisionError), autocast(recipe=RECIPE):
            fail()
    assert probe.scales() == (1.0, 1.0) and probe.seen() == (0.0, 0.0)
    with autocast(recipe=RECIPE):
        probe(tensor())
    assert probe.scales()[0] == FORWARD


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_another_step(reentrant):
    probe = Probe()

    def segment(x):
        with autocast(recipe=RECIPE):
            return probe(x)

    with autocast(recipe=RECIPE):
        y = checkpoint(segment, tensor(), use_reentrant=reentrant)
    y.sum().backward()
    assert probe.forward_state.amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0]
    assert probe.scales() == (FORWARD, BACKWARD)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def test_a_backward_pass_that_fails_leaves_no_trace():
    probe = Probe()
    with autocast(recipe=RECIPE):
        loss = probe(Failing.apply(tensor())).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert probe.scales()[1] == 1.0 and probe.seen()[1] == 0.0 and not backward_steps._steps
    with autocast(recipe=RECIPE):
        loss = probe(tensor()).sum()
    loss.backward()
    assert probe.scales() == (FORWARD, BACKWARD)


def test_calibration_needs_no_gradients():
    probe = Probe()
    with torch.no_grad(), autocast(enabled=False, calibrating=True, recipe=RECIPE):
        probe(tensor())
    assert probe.scales()[0] == FORWARD


def test_without_autocast_a_forward_is_a_step():
    probe = Probe()

    def forward(fail=False):
        with forward_step(probe.forward_state):
            probe.quantizer.calibrate(torch.full((4,), 2.0))
            assert not fail

    with torch.no_grad():
        forward()
    with pytest.raises(AssertionError):
        forward(fail=True)
    assert probe.scales()[0] == 1.0 and probe.seen()[0] == 0.0, "no trace of either"
    with autocast(recipe=RECIPE):
        forward()
        assert probe.scales()[0] == 1.0, "autocast says when a step ends, where there is one"
    assert probe.scales()[0] == FORWARD
    forward()
    assert probe.forward_state.amax_history[:, 0].tolist() == [0.0, 0.0, 2.0, 2.0]
    with forward_step(RecipeState.create(MXFP8BlockScaling(), mode="forward")):
        pass


def test_several_uses_in_one_step_are_one_update():
    probe = Probe()
    with autocast(recipe=RECIPE):
        probe(tensor(1.0))
        probe(tensor(2.0))
        assert len(active().step._ran) == 1
    assert probe.forward_state.amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0]


def change_recipe(probe):
    old = probe.forward_state
    probe.forward_state = RecipeState.create(DelayedScaling(margin=1, amax_history_len=4), mode="forward")
    assert probe.forward_state.inherit_state_from(old)
    probe.quantizer = probe.forward_state.make_quantizers()[0]
    return old


def test_states_that_share_a_history_are_undone_as_a_whole():
    probe = Probe()
    with torch.no_grad(), autocast(recipe=RECIPE):
        probe(tensor())
        old = change_recipe(probe)
        probe(tensor())
        assert len(active().step._ran) == 2 and old.amax_history[0].item() == 2.0
    assert probe.seen()[0] == 0.0 and probe.scales()[0] == 1.0


def test_states_that_share_a_history_are_updated_once(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")  # the rule that shows a second update
    probe = Probe()
    with autocast(recipe=RECIPE):
        probe(tensor())
        old = change_recipe(probe)
        probe(tensor())
    assert old.amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0]
    assert probe.scales()[0] == FORWARD / 2, "by the newer recipe"


def test_modules_that_are_gone_are_forgotten():
    probe, other = Probe(), Probe()
    with autocast(recipe=RECIPE):
        probe(tensor())
        other(tensor())
        del probe
        gc.collect()
        assert [ran.state() is not None for ran in active().step._ran] == [False, True]
    assert other.scales()[0] == FORWARD


def test_a_step_that_has_ended_takes_no_more():
    probe = Probe()
    with autocast(recipe=RECIPE):
        saved = active()
    FP8GlobalStateManager.set_autocast_state(saved)
    probe(tensor())
    assert not saved.step._ran
    FP8GlobalStateManager.reset()


def test_threads_end_their_own_steps():
    here, there = Probe(), Probe()
    ran, leave = threading.Event(), threading.Event()

    def other():
        with autocast(recipe=RECIPE):
            there(tensor())
            ran.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert ran.wait(10)
    with autocast(recipe=RECIPE):
        here(tensor())
    assert here.scales()[0] == FORWARD and there.scales()[0] == 1.0
    leave.set()
    thread.join()
    assert there.scales()[0] == FORWARD


def test_states_without_histories_are_no_concern():
    state = RecipeState.create(MXFP8BlockScaling(), mode="forward")
    with autocast(recipe=MXFP8BlockScaling()), forward_step(state):
        assert not active().step._ran


def test_requests_are_updated_like_the_recipe():
    probe = Probe(CustomRecipe(lambda role: DelayedScalingRequest(amax_history_len=4)))
    with autocast(recipe=CustomRecipe(lambda role: DelayedScalingRequest())):
        loss = probe(tensor()).sum()
    loss.backward()
    assert probe.scales() == (FORWARD, BACKWARD)


def test_steps_can_be_ended_by_hand():
    probe = Probe()
    with autocast(recipe=RECIPE):
        probe(tensor())
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        assert probe.scales() == (FORWARD, 1.0)
    backward_note(probe.backward_state)()
    probe.grad_quantizer.calibrate(torch.ones(4))
    assert probe.scales()[1] == 1.0
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
    assert probe.scales() == (FORWARD, BACKWARD)
    backward_note(probe.backward_state)()
    FP8GlobalStateManager.reset()
    assert not backward_steps._steps


# ---- two ranks -------------------------------------------------------------------------------------


def run_on_two_ranks(function, tmp_path):
    mp.start_processes(on_rank, args=(function, str(tmp_path / "store")), nprocs=2, start_method="fork")


def on_rank(rank, function, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        function(rank)
    finally:
        dist.destroy_process_group()


def train_on_rank(rank):
    shared, local = Probe(), Probe(DelayedScaling(amax_history_len=4, reduce_amax=False))
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    with autocast(recipe=RECIPE):
        loss = (shared(tensor(2.0 * (rank + 1))) + local(tensor(2.0 * (rank + 1)))).sum() * (rank + 1)
    loss.backward()
    assert shared.scales() == (448 / 4, 57344 / 2), "the largest amax of both ranks"
    assert local.scales() == (448 / (2 * (rank + 1)), 57344 / (rank + 1))
    own = Probe()
    with autocast(recipe=RECIPE, amax_reduction_group=alone):
        own(tensor(2.0 * (rank + 1))).sum().backward()
    assert own.scales()[0] == 448 / (2 * (rank + 1))


def run_different_modules(rank):
    probes = [Probe() for _ in range(rank + 1)]
    model = torch.nn.Sequential(*probes)
    with pytest.raises(RuntimeError, match="ran different modules"), autocast(recipe=RECIPE):
        model(tensor())
    assert all(probe.scales() == (1.0, 1.0) for probe in probes), "nothing was written"


@pytest.mark.parametrize("function", [train_on_rank, run_different_modules])
def test_amaxes_are_reduced_over_the_group(function, tmp_path):
    run_on_two_ranks(function, tmp_path)


def test_an_end_of_a_pass_that_was_never_made_is_deleted_without_a_word():
    """An exception of a signal's handler may come before `__init__`."""
    unmade = _EndOfPass.__new__(_EndOfPass)
    unmade()
    unmade.__del__()
