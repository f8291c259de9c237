"""A study does everything: its files agree, it goes on after an interruption, and says what it leaves out."""

import json

import pytest

from crossgrain import GemmRecipe
from crossgrain.gpt import GPTConfig
from crossgrain.lab import Sensitivity, Verification
from crossgrain.lab.gpt_checkpoint import GPTCheckpoint
from crossgrain.lab.study import study

OPTIONS = {"base": "hp", "candidates": ["nvfp4(2d, rht, sr)"], "count": 2, "tokens": 16384, "scale": 128, "minutes": 0}


@pytest.fixture(scope="module")
def checkpoint():
    made = GPTCheckpoint(GPTConfig(layers=1, width=32, heads=2, context=16), batch=4, learning_rate=1e-2)
    made.train(10)
    return made


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    return study(checkpoint.start(batches=2, steps=4), out=out, **OPTIONS), out


def test_all_files_are_there_and_agree(finished):
    result, out = finished
    assert Sensitivity.load(out / "sensitivity.json").to_dict() == result.sensitivity.to_dict()
    assert set(result.sensitivity.calibration) == {"dgrad", "wgrad"}
    written = json.loads((out / "study.json").read_text())["found"]
    assert written == json.loads(json.dumps(result.found.to_dict()))
    assert Verification.load(out / "verification.json").to_dict() == result.verification.to_dict()
    page = (out / "report.html").read_text()
    assert "GPT of 1 layers of 32, after 10 steps" in page and "The recipe that the search chose" in page
    assert all(path.exists() for path in result.files.values())


def test_the_recipe_saves_what_was_asked_and_is_verified_on_other_seeds(finished):
    result, _ = finished
    assert result.found.saving >= 0.8
    assert list(result.verification.recipes) == ["search", "nvfp4(2d, rht, sr) everywhere"]
    assert not set(result.verification.seeds) & set(result.calibration.seeds)
    assert GemmRecipe.load(result.verification.recipes["search"]) == GemmRecipe.load(str(result.found.recipe))


def test_a_second_call_runs_nothing_again(finished, checkpoint):
    result, out = finished
    start = checkpoint.start(batches=2, steps=4)
    run = start.branch
    taken = []
    start.branch = lambda recipe, seed: (taken.append(seed) or loss for loss in run(recipe, seed))
    again = study(start, out=out, **OPTIONS)
    assert again.found.to_dict() == result.found.to_dict()
    assert len(taken) <= 2 + 2 * 4  # only the steps that are timed


def test_a_later_call_with_other_candidates_uses_those_alone(checkpoint, tmp_path):
    start = checkpoint.start(batches=2, steps=2)
    study(start, out=tmp_path, **{**OPTIONS, "candidates": ["nvfp4", "mxfp8"]})
    later = study(start, out=tmp_path, **{**OPTIONS, "candidates": ["nvfp4"]})
    assert set(later.found.chosen.values()) <= {"hp", "nvfp4"} and "nvfp4 everywhere" in later.verification.recipes
    assert {"dgrad: nvfp4", "wgrad: nvfp4"} <= set(later.calibration.recipes)
    assert set(Sensitivity.load(tmp_path / "sensitivity.json").candidates) == {"hp", "nvfp4", "mxfp8"}


def test_an_interrupted_verification_goes_through(checkpoint, tmp_path):
    start = checkpoint.start(batches=2, steps=2)
    run = start.branch

    def interrupted(recipe, seed):
        if seed > 100:
            raise KeyboardInterrupt
        return run(recipe, seed)

    start.branch = interrupted
    with pytest.raises(KeyboardInterrupt):
        study(start, out=tmp_path, **OPTIONS)
    assert Verification.load(tmp_path / "verification.json").runs and not (tmp_path / "report.html").exists()


def test_without_a_branch_nothing_is_trained_and_it_is_said(checkpoint, tmp_path):
    start = checkpoint.start(batches=2)
    start.branch = None
    result = study(start, out=tmp_path, target={"max_gap": 1.0}, **OPTIONS)
    assert result.verification is None and result.calibration is None and not result.sensitivity.calibration
    assert "there is no branch" in result.notes[0] and (tmp_path / "report.html").exists()


def test_an_interruption_goes_through_and_the_next_call_goes_on(checkpoint, tmp_path):
    start = checkpoint.start(batches=2, steps=4)
    run, calls = start.branch, []

    def interrupted(recipe, seed):
        calls.append(seed)
        for loss in run(recipe, seed):
            if len(calls) == 6:
                raise KeyboardInterrupt
            yield loss

    start.branch = interrupted
    with pytest.raises(KeyboardInterrupt):
        study(start, out=tmp_path, **OPTIONS)
    done = len(Verification.load(tmp_path / "calibration.json").runs)
    assert done == 2
    start.branch = run
    assert study(start, out=tmp_path, **OPTIONS).verification is not None


def test_progress_goes_from_0_to_1(checkpoint, tmp_path):
    parts = []
    start = checkpoint.start(batches=2, steps=2)
    study(start, out=tmp_path, on_progress=lambda part, text: parts.append(part), **OPTIONS)
    assert parts == sorted(parts) and parts[-1] == 1
