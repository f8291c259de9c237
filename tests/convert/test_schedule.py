"""A converted model follows a schedule, and a resumed run computes what an uninterrupted one does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain import files
from crossgrain.recipe import GemmRecipe

from .test_model import Model

TWO_SWITCHES = "nvfp4; first 2 steps: hp; last 2 steps: fprop: hp"


def small_model() -> Model:
    torch.manual_seed(0)
    return Model()


def train(model, optimizer, conversion, steps: range, after=lambda done: None) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        tokens = torch.randint(48, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if conversion is not None:
            conversion.step()
        losses.append(loss.detach())
        after(step)
    return losses


def new_run(schedule: str, total: int | None = 6):
    model = small_model()
    conversion = cg.ScheduledConversion(model, schedule, total)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), conversion


# ---- following -------------------------------------------------------------------------------------


def test_each_phase_computes_by_its_recipe() -> None:
    """The same run, converted by hand before the steps at which phases begin."""
    model, optimizer, conversion = new_run(TWO_SWITCHES)
    torch.manual_seed(1)
    losses = train(model, optimizer, conversion, range(6))

    by_hand = small_model()
    cg.convert(by_hand, "hp")
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2)

    def switch(step: int) -> None:
        if step in (1, 3):
            cg.convert(by_hand, {1: "nvfp4", 3: "nvfp4, fprop: hp"}[step])

    torch.manual_seed(1)
    expected = train(by_hand, optimizer, None, range(6), switch)
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, model.parameters(), by_hand.parameters()))


def test_a_step_says_whether_a_phase_has_begun() -> None:
    model, _, conversion = new_run(TWO_SWITCHES)
    assert conversion.report.recipe == GemmRecipe.load("hp").for_model(model)
    before = dict(model.named_modules())
    assert [conversion.step() for _ in range(8)] == [False, True, False, True, False, False, False, False]
    assert dict(model.named_modules()) == before and conversion.steps_done == 8
    assert conversion.report.recipe == model.blocks[0].fc1.bound_recipe
    assert conversion.report.recipe == GemmRecipe.load("nvfp4, fprop: hp").for_model(model)
    assert conversion.set_step(0) and conversion.phase.label == "'first 2 steps'"
    with pytest.raises(ValueError, match="must not be negative"):
        conversion.set_step(-1)
    assert "steps_done=0" in repr(conversion)


def test_a_step_within_a_phase_converts_nothing(monkeypatch) -> None:
    _, _, conversion = new_run("nvfp4; from step 3: hp", None)
    calls = []
    monkeypatch.setattr(conversion, "_convert", lambda: calls.append(conversion.phase.recipe))
    for _ in range(5):
        conversion.step()
    assert calls == [GemmRecipe.load("hp")]


def test_options_of_convert_hold_in_all_phases() -> None:
    model = small_model()
    conversion = cg.ScheduledConversion(model, "nvfp4; from step 1: mxfp8", skip=iter(["blocks.0.*"]), norms=False)
    for _ in range(2):
        assert sorted(conversion.report.formats) == ["blocks.1.fc1", "blocks.1.fc2"]
        conversion.step()


def test_a_share_of_the_blocks_can_be_skipped() -> None:
    report = cg.convert(small_model(), "mxfp8", skip="last 50 % of blocks")
    assert sorted(report.formats) == ["blocks.0.fc1", "blocks.0.fc2"]


def test_a_phase_may_name_a_layer_that_is_left_by_default() -> None:
    model, optimizer, conversion = new_run("mxfp8; from step 1, head: nvfp4", None)
    assert "head" in conversion.report.left and type(model.head) is nn.Linear
    train(model, optimizer, conversion, range(2))
    assert "head" in conversion.report.formats
    conversion.set_step(0)
    assert type(model.head) is nn.Linear


def test_weights_that_were_cached_are_quantized_again() -> None:
    model, _, conversion = new_run("mxfp8; from step 1: all: nvfp4", None)
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        model(tokens)
        conversion.step()
        found = model(tokens)
        fresh = small_model()
        cg.convert(fresh, "all: nvfp4")
        assert torch.equal(found, fresh(tokens))


def test_weights_that_microbatches_share_are_dropped() -> None:
    layer = cg.Linear(32, 32, bias=False)
    conversion = cg.ScheduledConversion(nn.Sequential(layer), "mxfp8; from step 1: all: nvfp4")
    x = torch.randn(32, 32)
    layer(x, is_first_microbatch=True)
    assert layer._fp8_workspaces
    conversion.step()
    assert not layer._fp8_workspaces  # copies in the old format would take memory
    assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


def test_histories_are_kept_where_formats_stay() -> None:
    model, optimizer, conversion = new_run("fp8-delayed; from step 3: fprop: hp", None)
    train(model, optimizer, conversion, range(2))
    name = "blocks.0.fc1._extra_state"
    gradients = copy.deepcopy(model.state_dict()[name])
    assert conversion.step() and conversion.steps_done == 3
    kept = model.state_dict()[name]
    assert _tensors(gradients) and all(map(torch.equal, _tensors(gradients), _tensors(kept)))
    train(model, optimizer, conversion, range(1))


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in _tensors(value[key])]
    return [value] if isinstance(value, torch.Tensor) else []


# ---- resuming --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        TWO_SWITCHES,
        "mxfp8; from 30 % of steps: fp8-delayed; from step 4: mxfp8; last 1 step: fp8-delayed",  # histories come and go
        "mxfp8; from step 2, head: fp8-delayed; from step 4: nvfp4",  # another layer is converted
    ],
)
def test_a_run_that_is_interrupted_after_any_step_continues_bit_for_bit(schedule: str, tmp_path) -> None:
    model, optimizer, conversion = new_run(schedule)
    torch.manual_seed(1)

    def save(step: int) -> None:
        files.save_checkpoint(tmp_path, step, model=model, optimizer=optimizer, conversion=conversion)

    losses = train(model, optimizer, conversion, range(6), save)
    for step in range(5):
        again, again_optimizer, again_conversion = new_run(schedule)
        torch.manual_seed(99)
        done = files.load_checkpoint(
            tmp_path / f"step-{step:08d}", model=again, optimizer=again_optimizer, conversion=again_conversion
        )
        assert again_conversion.steps_done == step + 1
        rest = train(again, again_optimizer, again_conversion, range(done.step + 1, 6))
        assert all(map(torch.equal, rest, losses[step + 1 :])), step
        assert all(map(torch.equal, again.parameters(), model.parameters())), step


def test_states_of_other_schedules_are_refused() -> None:
    _, _, conversion = new_run(TWO_SWITCHES)
    conversion.set_step(3)
    state = conversion.state_dict()
    other = cg.ScheduledConversion(small_model(), "nvfp4; first 2 steps: mxfp8")
    with pytest.raises(ValueError, match="saved with the schedule 'fprop: .*call set_step"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="saved with total_steps=6, but here it is 8"):
        new_run(TWO_SWITCHES, 8)[2].load_state_dict(state)
    with pytest.raises(ValueError, match="it has no 'schedule'"):
        other.load_state_dict({})
    assert other.steps_done == 0
    without_total = cg.ScheduledConversion(small_model(), "nvfp4; first 2 steps: mxfp8", 9)
    without_total.load_state_dict(other.state_dict())  # its phases begin at the same steps


# ---- what is refused -------------------------------------------------------------------------------


def test_a_phase_that_does_not_fit_the_model_is_refused_before_anything_changes() -> None:
    for wrong, message in [
        (
            "mxfp8; from step 5, nothere: hp",
            r"phase from step 5 \('from step 5, nothere'\): 'nothere' matches no layer",
        ),
        (
            "mxfp8; *.fc1: fprop: nvfp4; from step 5, *.fc2|*.fc1: fprop.input: nvfp4",
            "layer 'blocks.0.fc2': fprop mult",
        ),
        ("mxfp8; last 3 steps: hp", "pass total_steps"),
    ]:
        model = small_model()
        with pytest.raises(ValueError, match=message):
            cg.ScheduledConversion(model, wrong)
        assert type(model.blocks[0].fc1) is nn.Linear


def test_weights_that_are_kept_quantized_cannot_change_their_format() -> None:
    def kept() -> nn.Module:
        with cg.quantized_model_init(recipe=GemmRecipe.load("mxfp8")):
            return nn.Sequential(cg.Linear(32, 32), cg.Linear(32, 32))

    with pytest.raises(ValueError, match=r"0 keeps its weight quantized, .* from mxfp8 rowwise, .*requantize_"):
        cg.ScheduledConversion(kept(), "mxfp8; from step 1: fprop: hp")
    model = kept()
    conversion = cg.ScheduledConversion(model, "mxfp8; from step 1: wgrad: hp")  # which reads no weight
    conversion.step()
    model(torch.randn(32, 32)).sum().backward()


def test_a_graph_of_another_phase_asks_to_be_compiled_again() -> None:
    model, _, conversion = new_run("mxfp8; from step 1: hp", None)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens = torch.arange(32).reshape(2, 16)
    compiled(tokens).sum().backward()
    conversion.step()
    with pytest.raises(RuntimeError, match="compile the model again"):
        compiled(tokens)
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(tokens), model(tokens))
