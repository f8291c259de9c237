"""A run is decided by its seed; looking at it changes nothing; it can be stopped."""

from dataclasses import replace

import pytest
import torch

from crossgrain.files import save_checkpoint
from crossgrain.gpt import PRESETS, GPTConfig, Preset, Trainer
from crossgrain.gpt.model import GPT
from crossgrain.gpt.training import losses_in, saved_bytes
from crossgrain.recipe import GemmRecipe, RecipeSchedule, as_recipe

SHORT = Preset(
    GPTConfig(layers=1, width=32, heads=2, context=16), batch=4, steps=4, learning_rate=1e-2, validation_batch=4
)


def parameters(trainer):
    return [parameter.detach() for parameter in trainer.model.parameters()]


def same(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("recipe", [None, "mxfp8", "nvfp4", "fp8-delayed"])
def test_the_same_seed_gives_the_same_run(recipe):
    trainers = [Trainer(SHORT, recipe and as_recipe(recipe), seed=1) for _ in range(2)]
    runs = [trainer.train() for trainer in trainers]
    assert runs[0].losses == runs[1].losses and runs[0].validation == runs[1].validation
    assert same(*map(parameters, trainers))


@pytest.mark.parametrize("recipe", [None, "mxfp8", "nvfp4", "fp8-delayed", "mxfp8-fwd-nvfp4-bwd"])
def test_validation_between_steps_changes_nothing(recipe):
    often, once = (
        Trainer(replace(SHORT, validations=validations), recipe and as_recipe(recipe), seed=0)
        for validations in (SHORT.steps, 1)
    )
    assert len(often.train().validation) == SHORT.steps and len(once.train().validation) == 1
    assert same(parameters(often), parameters(once))


def test_recipes_start_from_the_same_model_and_see_the_same_data():
    plain, quantized = Trainer(SHORT, None, 0), Trainer(SHORT, as_recipe("hp"), 0)
    assert same(parameters(plain), parameters(quantized))
    assert plain.train().losses == pytest.approx(quantized.train().losses, rel=1e-4)


def test_it_learns():
    run = Trainer(replace(SHORT, steps=30), as_recipe("mxfp8"), 0).train()
    assert run.losses[-1] < run.losses[0] - 0.5
    assert run.validation_loss < run.losses[0] - 0.5


def test_ctrl_c_keeps_what_was_done():
    def interrupt(run):
        if len(run.losses) == 2:
            raise KeyboardInterrupt

    run = Trainer(replace(SHORT, validations=1), None, 0).train(interrupt)
    assert run.interrupted and len(run.losses) == 2 and run.validation[-1][0] == 2


def test_low_precision_keeps_fewer_bytes_for_backward():
    kept = [Trainer(SHORT, recipe and as_recipe(recipe), 0).train().saved_bytes for recipe in (None, "mxfp8", "nvfp4")]
    assert kept[0] > kept[1] > kept[2] > 0


def test_saved_bytes_are_those_of_activations_not_of_parameters():
    model = GPT(SHORT.model)
    values = torch.zeros(4, 16, dtype=torch.long)
    small, large = (saved_bytes(model, values[:n], values[:n]) for n in (2, 4))
    assert 1.9 < large / small < 2.1


def test_presets_grow():
    sizes = [preset.model.layers * preset.model.width**2 for preset in PRESETS.values()]
    assert sizes == sorted(sizes) and PRESETS.keys() >= {"tiny", "small"}


def test_a_schedule_is_followed() -> None:
    """A run whose last phase is that of the other run differs from it only from the phase's first step on."""
    schedule = RecipeSchedule.load("mxfp8; last 50 % of steps: all: nvfp4")
    switched = Trainer(SHORT, schedule, seed=0).train()
    plain = Trainer(SHORT, GemmRecipe.load("mxfp8"), seed=0).train()
    assert [a == b for a, b in zip(switched.losses, plain.losses, strict=True)] == [True, True, False, False]
    assert switched.recipe == str(schedule)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "nvfp4", "fp8-delayed", "nvfp4; from step 3: mxfp8"])
def test_a_run_that_was_saved_goes_on_bit_for_bit(recipe, tmp_path):
    loaded = recipe and (RecipeSchedule.load(recipe) if ";" in recipe else as_recipe(recipe))
    whole = Trainer(SHORT, loaded, seed=1)
    run = whole.train(lambda run: whole.save(tmp_path) if len(run.losses) == 2 else None)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    resumed = Trainer.resumed(tmp_path)
    assert resumed.run.losses == run.losses[:2] == losses_in(tmp_path) and resumed.run.recipe == run.recipe
    again = resumed.train()
    assert again.losses == run.losses and again.validation == run.validation
    assert again.saved_bytes == run.saved_bytes
    assert same(parameters(whole), parameters(resumed))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_can_be_brought_to_a_step(tmp_path):
    whole = Trainer(SHORT, as_recipe("nvfp4"), seed=1)
    run = whole.train(lambda run: whole.save(tmp_path) if len(run.losses) == 1 else None)
    trainer = Trainer.resumed(tmp_path)
    trainer.train_to(3)
    assert trainer.run.losses == run.losses[:3]
    assert trainer.train().losses == run.losses and same(parameters(trainer), parameters(whole))
    with pytest.raises(ValueError, match="4 steps are done already, which is more than 2"):
        trainer.train_to(2)


def test_checkpoints_of_others_are_refused(tmp_path):
    save_checkpoint(tmp_path, 1, model=torch.nn.Linear(2, 2))
    for load in (Trainer.resumed, losses_in):
        with pytest.raises(ValueError, match="was not saved by crossgrain train"):
            load(tmp_path)
