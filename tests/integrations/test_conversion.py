"""How a model was converted, in a file beside it."""

import json

import pytest
from torch import nn

import crossgrain as cg
from crossgrain.integrations.conversion import FILE, Conversion

RECIPE = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(sr)"


def model():
    return nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "norm": nn.LayerNorm(32)})


def test_a_file_converts_another_model_alike(tmp_path):
    conversion = Conversion.of(RECIPE, "b", (), True)
    conversion.save(tmp_path, schedule={"step": 3})
    assert Conversion.load(tmp_path) == (conversion, {"step": 3})
    one, other = model(), model()
    report = cg.convert(one, RECIPE, skip="b", norms=True)
    assert str(Conversion.load(tmp_path)[0].convert(other)) == str(report)
    content = json.loads((tmp_path / FILE).read_text())
    assert content["version"] == 1 and content["schedule"] == {"step": 3} and content["skip"] == ["b"]


@pytest.mark.parametrize("recipe", [cg.recipe.DelayedScaling(amax_history_len=4), cg.recipe.MXFP8BlockScaling()])
def test_recipe_classes_are_written_too(recipe, tmp_path):
    Conversion.of(recipe, (), (), False).save(tmp_path)
    assert Conversion.load(tmp_path)[0].read_recipe() == recipe


@pytest.mark.parametrize("choice", [nn.Linear, [nn.LayerNorm, "b"], lambda path, module: path == "b"])
def test_choices_that_cannot_be_written_must_be_given_again(choice, tmp_path):
    conversion = Conversion.of(RECIPE, choice, (), False)
    conversion.save(tmp_path)
    assert conversion.skip is None
    with pytest.raises(ValueError, match="types or functions as skip, which were not saved; pass skip="):
        Conversion.load(tmp_path)[0].convert(model())
    assert list(Conversion.load(tmp_path)[0].convert(model(), skip="b").left) == ["b"]


def test_a_schedule_converts_for_the_step_at_which_it_was_saved(tmp_path):
    schedule = cg.RecipeSchedule.load("nvfp4; last 50 % of steps: mxfp8")
    conversion = Conversion.of(schedule, (), (), False)
    conversion.save(tmp_path, schedule={"steps_done": 3, "total_steps": 4})
    loaded, state = Conversion.load(tmp_path)
    assert loaded.read_recipe() == schedule
    assert loaded.convert(model(), schedule=state).recipe == cg.GemmRecipe.load("mxfp8")
    with pytest.raises(ValueError, match="the step at which the schedule .* was saved is not known"):
        loaded.convert(model())


def test_differences():
    one = Conversion.of(RECIPE, ("a",), (), False)
    assert one.difference(one) is None
    for other, match in (
        (None, "made without crossgrain"),
        (Conversion.of("mxfp8", ("a",), (), False), "made with recipe '.*mxfp8'"),
        (Conversion.of(RECIPE, ("b",), (), False), r"made with skip \['b'\], and it is \['a'\] now"),
        (Conversion.of(RECIPE, ("a",), ("b",), False), "made with include"),
        (Conversion.of(RECIPE, ("a",), (), True), "made with norms True"),
    ):
        with pytest.raises(ValueError, match=f"{match}.*allow_other_recipe=True"):
            one.check_same(other, allow_other_recipe=False)
        one.check_same(other, allow_other_recipe=True)
    assert one.difference(Conversion.of(RECIPE, nn.Linear, (), False)) is None  # unknown


@pytest.mark.parametrize(
    "text, match",
    [
        ("", "damaged"),
        ("[1]", "damaged"),
        ("{}", "damaged"),
        ('{"version": 2}', "version 2, but only version 1"),
        ('{"version": 1}', "does not describe how a model was converted"),
        ('{"version": 1, "recipe": 3}', "does not describe"),
        ('{"version": 1, "recipe": "mxfp8", "surprise": 1}', "unknown entries .*surprise"),
        ('{"version": 1, "recipe": "mxfp8", "skip": "a"}', "skip must be a list of patterns"),
        ('{"version": 1, "recipe": "mxfp8", "include": [1]}', "include must be a list of patterns"),
    ],
)
def test_damaged_files_are_refused(text, match, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=match):
        Conversion.load(tmp_path)


def test_a_directory_without_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no crossgrain.json"):
        Conversion.load(tmp_path)


def test_a_recipe_that_cannot_be_written_is_refused_at_once():
    recipe = cg.recipe.CustomRecipe(qfactory=lambda role: None)
    with pytest.raises(ValueError, match="qfactory"):
        Conversion.of(recipe, (), (), False)
