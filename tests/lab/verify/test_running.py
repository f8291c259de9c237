"""verify runs every recipe on the same seeds and data, keeps what is finished, and says what is wrong with a branch."""

import itertools
import json
import math
import re

import pytest
import torch

from crossgrain.lab import BranchError, Verification, verify
from crossgrain.lab.verify import DIVERGED
from crossgrain.recipe import GemmRecipe, RecipeSchedule

from .branches import made_of, tiny

RANDOM = "nvfp4"  # the preset rounds gradients stochastically


def level(by_recipe):
    """Losses of a level for each recipe, and a little more for each seed and step."""

    def losses(recipe, seed):
        for step in itertools.count():
            yield seed + by_recipe.get(recipe, 0.0) + 0.01 * seed * (recipe is not None) + 1 / (1 + step)

    return made_of(losses)


MXFP8, NVFP4 = str(GemmRecipe.load("mxfp8")), str(GemmRecipe.load("nvfp4"))


# ---- pairs -----------------------------------------------------------------------------------------------------------


def test_every_recipe_is_run_with_every_seed_beside_high_precision():
    called = []

    def branch(recipe, seed):
        called.append((recipe, seed))
        return itertools.repeat(1.0)

    result = verify(branch, ["nvfp4", "mxfp8"], seeds=2, steps=3)
    recipes = [None, GemmRecipe.load("nvfp4"), GemmRecipe.load("mxfp8")]
    assert called == [(recipe, seed) for seed in (0, 1) for recipe in recipes]
    assert result.labels == ["high precision", "nvfp4", "mxfp8"] and all(len(run.losses) == 3 for run in result.runs)


def test_the_gap_is_that_of_pairs_over_the_last_half():
    result = verify(level({NVFP4: 0.5, MXFP8: 0.1}), ["nvfp4", "mxfp8"], seeds=[3, 5], steps=4)
    assert result.last == 2
    assert result.paired("nvfp4").by_seed == pytest.approx({3: 0.53, 5: 0.55})
    assert result.gap("nvfp4").mean == pytest.approx(0.54)
    between = result.gap("nvfp4", "mxfp8")
    assert between.mean == pytest.approx(0.4) and between.half_width < 1e-9  # what the seed adds is in both


def test_a_branch_that_ignores_its_seed_is_one_run_and_it_is_said():
    same = level({NVFP4: 0.5})
    result = verify(lambda recipe, seed: same(recipe, 0), ["nvfp4"], seeds=3, steps=4, tolerance=1.0)
    assert result.ignores_seeds() and result.gap("nvfp4").count == 1 and math.isinf(result.gap("nvfp4").high)
    assert result.paired("nvfp4").verdict == "not resolved"
    assert "the branch ignores its seed, and the runs count as one" in str(result)
    assert not verify(same, ["nvfp4"], seeds=2, steps=4).ignores_seeds()


def test_high_precision_against_itself_is_exactly_zero():
    result = verify(tiny, ["mxfp8"], seeds=2, steps=5, control=True)
    first, again = (result.finished("high precision", control=control) for control in (False, True))
    assert [run.losses for run in first.values()] == [run.losses for run in again.values()]
    control = result.control("high precision")
    assert control.by_seed == {0: 0.0, 1: 0.0} and control.p_value == 1 and not control.significant
    assert result.control("mxfp8").by_seed == {0: 0.0, 1: 0.0}  # nothing in it is random
    assert "high precision against itself differs by exactly 0" in str(result)


def test_a_control_has_the_same_data_and_other_draws():
    seen = []

    def branch(recipe, seed):
        data, default = torch.Generator().manual_seed(seed), torch.randn(4)
        for loss in tiny(recipe, seed):
            seen.append((default, torch.rand(4), torch.rand(4, generator=data)))
            yield loss

    result = verify(branch, [RANDOM], seeds=1, steps=3, control=True)
    runs = [seen[start : start + 3] for start in range(0, len(seen), 3)]
    assert len(runs) == 4  # both, twice
    for run in runs[1:]:
        assert all(
            torch.equal(a, b) for one, other in zip(run, runs[0], strict=True) for a, b in zip(one, other, strict=True)
        )
    label = result.labels[1]
    assert result.run(label, 0).losses != result.run(label, 0, control=True).losses


def test_the_runs_of_a_recipe_can_be_repeated():
    one, other = (verify(tiny, [RANDOM], seeds=1, steps=3) for _ in range(2))
    assert [run.losses for run in one.runs] == [run.losses for run in other.runs]


def test_a_recipe_against_itself_is_seldom_significant():
    """100 comparisons of a recipe with itself, on the same data with other draws: at most 8 are significant at 5 %."""
    significant = 0
    for first in range(0, 300, 3):
        result = verify(tiny, [RANDOM], seeds=range(first, first + 3), steps=4, control=True)
        control = result.control(result.labels[1])
        assert all(control.by_seed.values())  # the draws did differ
        significant += control.significant
    assert significant <= 8


def test_the_generator_of_the_caller_is_left_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    verify(tiny, ["nvfp4"], seeds=1, steps=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_branch_that_is_not_decided_by_its_seed_is_noticed():
    numbers = itertools.count()
    result = verify(lambda recipe, seed: (float(next(numbers)) for _ in range(9)), ["mxfp8"], steps=2, control=True)
    assert "the branch is not a function of its seed" in str(result)


# ---- recipes ---------------------------------------------------------------------------------------------------------


def test_recipes_may_have_labels_phases_and_any_form():
    seen = []

    def branch(recipe, seed):
        seen.append(recipe)
        return itertools.repeat(1.0)

    given = {"mine": GemmRecipe.load("mxfp8"), "late": "nvfp4; last 50 % of steps: hp"}
    result = verify(branch, given, seeds=1, steps=2, baseline="nvfp4")
    assert result.labels == ["nvfp4", "mine", "late"] and result.baseline_recipe == NVFP4
    assert isinstance(seen[2], RecipeSchedule) and seen[:2] == [GemmRecipe.load("nvfp4"), GemmRecipe.load("mxfp8")]


def test_long_recipes_get_letters_and_high_precision_may_be_one():
    result = verify(level({}), [GemmRecipe.load("nvfp4"), None], seeds=1, steps=2, baseline="mxfp8")
    assert result.labels == ["mxfp8", "recipe A", "high precision"] and result.recipes["recipe A"] == NVFP4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"recipes": ["nvfp4", "nvfp4"]}, "'nvfp4' is there twice; control=True"),
        ({"recipes": [None]}, "'high precision' is the baseline; control=True"),
        ({"recipes": {"high precision": "nvfp4"}}, "the label of two recipes"),
        ({"recipes": ["nvfp5"]}, "nvfp5"),
        ({"seeds": 0}, "at least 1"),
        ({"seeds": [1, 1]}, "seeds that differ"),
        ({"steps": 0}, "got last=1 of steps=0"),
        ({"last": 9, "steps": 3}, "got last=9 of steps=3"),
        ({"tolerance": -1.0}, "above 0 and finite, got -1"),
        ({"control": "mxfp8"}, "there is no recipe 'mxfp8'; there are: nvfp4"),
    ],
)
def test_mistakes_are_found_before_anything_runs(arguments, message):
    def branch(recipe, seed):
        raise AssertionError("it ran")

    with pytest.raises(ValueError, match=message):
        verify(branch, **{"recipes": ["nvfp4"], **arguments})


# ---- branches that fail ----------------------------------------------------------------------------------------------


def failing(recipe_text, seed, tail):
    """A branch of the same loss; with one recipe and one seed it yields it twice, and then what ``tail`` does."""

    def losses(recipe, its_seed):
        if (recipe, its_seed) != (recipe_text, seed):
            yield from itertools.repeat(1.0 + its_seed)
        yield from (1.0 + its_seed, 1.0 + its_seed)
        yield from tail()

    return made_of(losses)


def out_of_batches():
    yield next(iter([]))


def raising():
    raise OSError("the disk is full")
    yield


@pytest.mark.parametrize(
    "tail, message",
    [
        (list, "nvfp4, seed 1, step 3: the branch ended after 2 of 4 losses. Give it enough batches"),
        (out_of_batches, "nvfp4, seed 1, step 3: the branch ended after 2 of 4 losses. Give it enough batches"),
        (raising, "nvfp4, seed 1, step 3: the branch raised OSError: the disk is full"),
        (
            lambda: [(1.0, 2.0)],
            "nvfp4, seed 1, step 3: a branch must yield a number for each step, but it yielded tuple",
        ),
        (lambda: [torch.ones(2)], "step 3: a branch must yield a number for each step, but it yielded Tensor"),
    ],
)
def test_a_branch_that_fails_is_named_and_what_is_finished_is_kept(tail, message, tmp_path):
    path = tmp_path / "runs.json"
    with pytest.raises(BranchError, match=message.replace(".", "\\.")) as raised:
        verify(failing(NVFP4, 1, tail), ["nvfp4"], seeds=2, steps=4, path=path)
    for kept in (raised.value.verification, Verification.load(path)):
        assert [(run.label, run.seed) for run in kept.runs] == [
            ("high precision", 0), ("nvfp4", 0), ("high precision", 1)
        ]  # fmt: skip
    mended = verify(level({}), ["nvfp4"], seeds=2, steps=4, path=path)
    assert len(mended.runs) == 4 and mended.runs[:3] == raised.value.verification.runs


@pytest.mark.parametrize("returned", [None, 3.0])
def test_a_branch_that_does_not_yield_is_told_so(returned):
    with pytest.raises(BranchError, match="step 1: a branch must yield losses, as a generator does, but it returned"):
        verify(lambda recipe, seed: returned, ["nvfp4"])


def test_a_call_that_raises_is_told_with_its_recipe_and_seed():
    with pytest.raises(BranchError, match="high precision, seed 0, step 1: the branch raised ZeroDivisionError"):
        verify(lambda recipe, seed: [1 / 0], ["nvfp4"])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_its_run_and_no_other(loss, tmp_path):
    result = verify(
        failing(NVFP4, 1, lambda: [loss, 1.0]), ["nvfp4", "mxfp8"], seeds=3, steps=4, tolerance=0.1, path=tmp_path / "v"
    )
    rows = {row.label: row for row in result.rows()}
    assert rows["nvfp4"].verdict == DIVERGED and rows["nvfp4"].diverged == {1: 3} and rows["nvfp4"].paired is None
    assert rows["mxfp8"].paired.gap.count == 3 and len(result.runs) == 9
    assert result.run("nvfp4", 1).losses == [2.0, 2.0]
    with pytest.raises(ValueError, match="nvfp4 diverged with seed 1 at step 3: a gap over the seeds that are left"):
        result.gap("nvfp4")
    assert "nvfp4 diverged with seed 1 at step 3." in str(result)
    json.loads((tmp_path / "v").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_a_baseline_that_diverges_loses_its_seed_and_says_so():
    result = verify(failing(None, 1, lambda: [math.nan]), ["nvfp4"], seeds=3, steps=4)
    assert result.paired("nvfp4").by_seed.keys() == {0, 2}
    assert "seeds with which the baseline itself diverged: 1" in str(result)


def test_generators_are_closed_before_the_next_run_begins():
    events, held = [], []

    def losses(recipe):
        try:
            while True:
                yield 1.0
        finally:
            events.append("closed")

    def branch(recipe, seed):
        events.append("called")
        held.append(losses(recipe))  # so that it is not closed because nobody refers to it
        return held[-1]

    verify(branch, ["nvfp4"], seeds=1, steps=2)
    assert events == ["called", "closed", "called", "closed"]


# ---- stopping and continuing -----------------------------------------------------------------------------------------


def interrupting(run):
    if (run.label, run.seed, len(run.losses)) == ("nvfp4", 1, 2):
        raise KeyboardInterrupt


def test_ctrl_c_keeps_the_runs_that_are_finished(tmp_path):
    result = verify(level({}), ["nvfp4"], seeds=3, steps=4, on_step=interrupting, path=tmp_path / "runs.json")
    assert result.interrupted and len(result.runs) == 3 and result.gap("nvfp4").count == 1
    assert "stopped early" in str(result)
    assert Verification.load(tmp_path / "runs.json") == result


def test_a_second_call_runs_what_is_missing_and_nothing_else(tmp_path):
    path, branch = tmp_path / "runs.json", level({NVFP4: 0.5})
    stopped = verify(branch, ["nvfp4"], seeds=3, steps=4, on_step=interrupting, path=path)
    called = []

    def counted(recipe, seed):
        called.append((recipe and str(recipe), seed))
        return branch(recipe, seed)

    finished = verify(counted, ["nvfp4"], seeds=3, steps=4, path=path)
    assert called == [(NVFP4, 1), (None, 2), (NVFP4, 2)]
    assert not finished.interrupted and finished.runs[:3] == stopped.runs
    assert [run.losses for run in finished.runs] == [
        run.losses for run in verify(branch, ["nvfp4"], seeds=3, steps=4).runs
    ]
    called.clear()
    again = verify(counted, ["nvfp4", "mxfp8"], seeds=4, steps=4, last=1, tolerance=1.0, path=path)
    assert called == [(MXFP8, 0), (MXFP8, 1), (MXFP8, 2), (None, 3), (NVFP4, 3), (MXFP8, 3)]
    assert again.rows()[1].verdict == "not above the tolerance"
    called.clear()
    fewer = verify(counted, ["mxfp8"], seeds=1, steps=4, path=path)
    assert not called and fewer.labels == ["high precision", "nvfp4", "mxfp8"] and len(fewer.runs) == 12


def test_recipes_keep_the_labels_that_they_have_in_the_file(tmp_path):
    first, second = GemmRecipe.load("nvfp4"), GemmRecipe.load("mxfp8")
    verify(level({}), [first], seeds=1, steps=2, path=tmp_path / "runs.json")
    result = verify(level({}), [second, first], seeds=1, steps=2, path=tmp_path / "runs.json")
    assert result.recipes == {"recipe A": NVFP4, "recipe B": MXFP8} and len(result.runs) == 3


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"steps": 5}, "steps 4 there and 5 here"),
        ({"baseline": "mxfp8"}, f"baseline 'high precision' there and '{MXFP8}' here"),
        ({"recipes": {"nvfp4": "mxfp8"}}, "'nvfp4' is the label of two recipes"),
    ],
)
def test_a_file_of_another_set_up_is_refused_and_kept(changed, message, tmp_path):
    path = tmp_path / "runs.json"
    verify(level({}), ["nvfp4"], seeds=1, steps=4, path=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=re.escape(message)):
        verify(level({}), **{"recipes": ["nvfp4"], "seeds": 1, "steps": 4, **changed}, path=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"verification": 1}', '{"verification": 99}'])
def test_a_file_that_is_something_else_is_refused_by_name(content, tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="runs.json: "):
        verify(level({}), ["nvfp4"], path=path)
    assert path.read_text() == content


def test_steps_are_told():
    seen = []
    verify(
        level({}), ["nvfp4"], seeds=1, steps=2, on_step=lambda run: seen.append((run.label, run.seed, len(run.losses)))
    )
    assert seen == [("high precision", 0, 1), ("high precision", 0, 2), ("nvfp4", 0, 1), ("nvfp4", 0, 2)]
