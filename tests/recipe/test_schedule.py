"""Schedules: their text, which recipe a step has, and what is refused."""

import pickle
from pathlib import Path

import pytest

import crossgrain as cg
from crossgrain.recipe import PRESETS, SCHEDULES, GemmRecipe, RecipeSchedule, RecipeSyntaxError, as_recipe
from crossgrain.recipe.percent import Percent
from crossgrain.recipe.phases import PhaseRule, Steps, parse_pattern

from ..common.recipes import Model

LINES = [
    "nvfp4; last 10 % of steps: mxfp8; *.lm_head: hp",
    "hp; from step 100: nvfp4; last 500 steps, first 2 blocks: hp",
    "mxfp8, blocks: layers; first 12.5 % of steps: hp; from 60 % of steps: fprop: hp, nonfinite: raise",
    "nvfp4; first 1 step: hp; last 15 % of blocks: all: nvfp4",
    *PRESETS,
    *SCHEDULES,
]


def starts(line: str, total: int | None = None) -> list[int]:
    return [phase.start for phase in RecipeSchedule.load(line).phases(total)]


# ---- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
def test_a_schedule_can_be_written_down_and_read_again(line: str, tmp_path: Path) -> None:
    schedule = RecipeSchedule.load(line)
    schedule.save(tmp_path / "schedule.json")
    copies = [
        RecipeSchedule.load(str(schedule)),
        RecipeSchedule.from_dict(schedule.to_dict()),
        RecipeSchedule.load(tmp_path / "schedule.json"),
        pickle.loads(pickle.dumps(schedule)),
        eval(repr(schedule), {"RecipeSchedule": RecipeSchedule}),
    ]
    assert all(copy == schedule and hash(copy) == hash(schedule) for copy in copies)


@pytest.mark.parametrize("line", [*PRESETS, "mxfp8, dgrad: hp; first 2 blocks: nvfp4; *.lm_head: hp"])
def test_every_recipe_is_a_schedule_without_phases(line: str) -> None:
    schedule = RecipeSchedule.load(line)
    assert not schedule.changes and not schedule.needs_total
    assert schedule.recipe_at(7) == GemmRecipe.load(line) == GemmRecipe.load(str(schedule))
    assert schedule == RecipeSchedule.load(GemmRecipe.load(line))


def test_patterns_of_phases() -> None:
    ten = Percent.parse("10")
    assert parse_pattern("last 10% of  steps") == (Steps("last", ten), None)
    assert parse_pattern(" from 10.0 % of steps ") == (Steps("from", ten), None)
    assert parse_pattern("from step 0") == (Steps("from", 0), None)
    steps, matcher = parse_pattern("first 1 step, a|b")
    assert str(steps) == "first 1 step" and str(matcher) == "a|b"
    assert parse_pattern("steps.first")[0] is None  # a path


def test_a_schedule_can_be_made_of_parts() -> None:
    base = GemmRecipe.load("nvfp4; a: hp")
    made = RecipeSchedule(base, ("last 10 % of steps: mxfp8", ("from step 5, b", {"fprop": "hp"})))  # type: ignore[arg-type]
    assert made == RecipeSchedule.load("nvfp4; a: hp; last 10 % of steps: mxfp8; from step 5, b: fprop: hp")


@pytest.mark.parametrize(
    "line, message, pointed",
    [
        ("until step 100: hp", "did you mean 'first 100 steps'?", "until step 100"),
        ("after step 3: hp", "did you mean 'from step 3'?", "after step 3"),
        ("last 10% steps: hp", "did you mean 'last 10 % of steps'?", "last 10% steps"),
        ("last 5 percent of steps: hp", "did you mean 'last 5 % of steps'?", "last 5 percent of steps"),
        ("last 10 % of stepss: hp", "did you mean 'last 10 % of steps'?", "last 10 % of stepss"),
        ("last 0 % of steps: hp", "above 0 and at most 100, got 0 %", "last 0 % of steps"),
        ("first 0 steps: hp", "at least 1", "first 0 steps"),
        ("from 100 % of steps: hp", "there is no step after 100 %", "from 100 % of steps"),
        ("last 10 % of steps, a b: hp", "'a b' is not a pattern", "a b"),
        ("*.a, *.b: hp", "before a comma there must be the steps of a phase", "*.a"),
        ("last 10 % of steps: allow_mixed: true", "is an option of the whole recipe", "true"),
        ("last 10 % of steps: mxfp9", "did you mean 'mxfp8'?", "mxfp9"),
        ("last 10 % of blocks, a: hp", "before a comma there must be", "last 10 % of blocks"),
    ],
)
def test_errors_point_at_the_mistake(line: str, message: str, pointed: str) -> None:
    with pytest.raises(RecipeSyntaxError) as caught:
        RecipeSchedule.load(f"nvfp4; {line}")
    first, text, carets = str(caught.value).split("\n")
    assert message in first
    assert text[carets.index("^") :][: carets.count("^")].strip() == pointed


def test_errors_in_mappings_name_the_rule() -> None:
    with pytest.raises(ValueError, match=r"rule 2: .*did you mean 'first 3 steps'"):
        RecipeSchedule.from_dict({"preset": "nvfp4", "rules": [{"a": "hp"}, {"until step 3": "hp"}]})
    with pytest.raises(ValueError, match="the phase 'last 3 steps' sets nothing"):
        RecipeSchedule.from_dict({"preset": "nvfp4", "rules": {"last 3 steps": {}}})
    with pytest.raises(TypeError, match="a schedule must be"):
        RecipeSchedule.load(3)  # type: ignore[arg-type]


# ---- which recipe a step has -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, total, expected",
    [
        ("nvfp4; last 10 % of steps: hp", 1000, [0, 900]),
        ("nvfp4; last 10 % of steps: hp", 3, [0, 2]),  # one step at least
        ("nvfp4; last 10 % of steps: hp", 1, [0]),
        ("nvfp4; first 40 % of steps: hp; last 60 % of steps: mxfp8", 11, [0, 4]),  # they meet
        ("nvfp4; first 50 % of steps: hp; last 50 % of steps: mxfp8", 7, [0, 4]),
        ("nvfp4; from 25 % of steps: hp", 10, [0, 3]),  # 2.5 is rounded up
        ("nvfp4; first 3 steps: hp; from step 7: hp", None, [0, 3, 7]),
        ("nvfp4; first 3 steps: hp; from step 2: mxfp8", None, [0, 2]),
        ("nvfp4; last 4 steps: hp", 10, [0, 6]),
        ("nvfp4; last 40 steps: hp", 10, [0]),
        ("nvfp4; from step 20: hp", 10, [0]),
        ("nvfp4; from step 2: nvfp4; from step 3: hp", None, [0, 3]),  # nothing changes at 2
    ],
)
def test_where_phases_begin(line: str, total: int | None, expected: list[int]) -> None:
    assert starts(line, total) == expected
    schedule = RecipeSchedule.load(line)
    phases = schedule.phases(total)
    for step in range(12):
        recipe = [phase.recipe for phase in phases if phase.start <= step][-1]
        if total is None or step < total:
            assert schedule.recipe_at(step, total) == recipe
            assert schedule.recipe_at(step, total) is schedule.recipe_at(step, total)  # layers compare by identity
    assert schedule.recipe_at(10**9, total) == schedule.recipe_at((total or 10**8) - 1, total)


def test_a_phase_changes_what_it_names_and_later_phases_win() -> None:
    schedule = RecipeSchedule.load("nvfp4; from step 1: fprop: hp; from step 2: dgrad: mxfp8; from step 3: mxfp8")
    expected = ["nvfp4", "nvfp4, fprop: hp", "nvfp4, fprop: hp, dgrad: mxfp8", "mxfp8"]
    for step, line in enumerate(expected):
        assert schedule.recipe_at(step) == GemmRecipe.load(line)


def test_a_phase_replaces_operands_and_sources_as_a_rule_does() -> None:
    base = "nvfp4(rht, sr), fprop.weight: nvfp4(2d), weight.source: dequantized, attention: fp8, attention.s: hp"
    for change in (
        "mxfp8",
        "fprop: nvfp4",
        "attention: mxfp8",
        "all: nvfp4",
        "weight.source: original",
        "nvfp4-1d-weight",
    ):
        phase = RecipeSchedule.load(f"{base}; from step 1: {change}").recipe_at(1)
        rule = GemmRecipe.load(f"{base}; *: {change}")
        for tensor in ("input", "weight", "grad_output"):
            for kind, name in (("linear", tensor), ("dpa", "s"), ("dpa", "qkv")):
                role = cg.QuantizerRole(kind, name, "x")
                expected = repr(rule.qfactory(role))
                assert repr(phase.qfactory(role)) == repr(GemmRecipe.load(str(phase)).qfactory(role)) == expected, (
                    change
                )


def test_rules_for_layers_are_stronger_than_phases_unless_a_phase_has_a_pattern() -> None:
    schedule = RecipeSchedule.load("nvfp4; head: mxfp8; last 2 steps: hp; last 1 step, *: hp")
    found = [str(schedule.recipe_at(step, 4).layer_formats("head").format("fprop", "input").value) for step in range(4)]
    assert found == ["mxfp8", "mxfp8", "mxfp8", "hp"]
    before = RecipeSchedule.load("nvfp4; from step 1, *: hp; head: mxfp8")  # rules win in their order
    assert str(before.recipe_at(1).layer_formats("head").format("fprop", "input").value) == "mxfp8"


def test_the_number_of_all_steps_is_asked_for_where_it_is_needed() -> None:
    schedule = RecipeSchedule.load("nvfp4; last 3 steps: hp")
    assert schedule.needs_total and not RecipeSchedule.load("nvfp4; first 3 steps: hp").needs_total
    for asked in (lambda: schedule.recipe_at(3), schedule.phases):
        with pytest.raises(ValueError, match="'last 3 steps': .*pass total_steps"):
            asked()
    with pytest.raises(ValueError, match="at least 1"):
        schedule.phases(0)
    with pytest.raises(ValueError, match="counted from 0"):
        schedule.recipe_at(-1, 5)


def test_operands_that_do_not_pair_in_a_phase_are_found_at_once() -> None:
    with pytest.raises(ValueError, match=r"in the phase 'last 3 steps': fprop multiplies .*allow_mixed"):
        RecipeSchedule.load("nvfp4; last 3 steps: fprop.input: mxfp8")
    RecipeSchedule.load("nvfp4, allow_mixed: true; last 3 steps: fprop.input: mxfp8")


# ---- presets, refusals -----------------------------------------------------------------------------


def test_the_late_switch_of_nvfp4_in_both_forms() -> None:
    everything, forward = RecipeSchedule.load("nvfp4-late-hp"), RecipeSchedule.load("nvfp4-late-hp-fwd")
    assert starts("nvfp4-late-hp", 1000) == starts("nvfp4-late-hp-fwd", 1000) == [0, 820]
    assert everything.recipe_at(0, 1000) == forward.recipe_at(819, 1000) == GemmRecipe.load("nvfp4")
    assert everything.recipe_at(820, 1000) == GemmRecipe.load("hp")
    assert forward.recipe_at(820, 1000) == GemmRecipe.load("nvfp4, fprop: hp")
    changed = RecipeSchedule.load("NVFP4-late-hp, dgrad: mxfp8; *.lm_head: hp")
    assert changed == RecipeSchedule.load("nvfp4, dgrad: mxfp8; last 18 % of steps: hp; *.lm_head: hp")
    assert (
        RecipeSchedule.from_dict({"preset": "nvfp4-late-hp", "dgrad": "mxfp8", "rules": {"*.lm_head": "hp"}}) == changed
    )


@pytest.mark.parametrize("value", ["nvfp4; last 10 % of steps: hp", "nvfp4-late-hp", {"preset": "nvfp4-late-hp"}])
def test_a_schedule_is_refused_where_a_recipe_is_needed(value) -> None:
    for refuse in (
        as_recipe,
        GemmRecipe.load,
        lambda line: as_recipe(RecipeSchedule.load(line)),
        lambda line: cg.autocast(recipe=line),
        lambda line: cg.autocast(recipe=RecipeSchedule.load(line)),
        lambda line: cg.convert(Model(), line),
        lambda line: cg.convert(Model(), RecipeSchedule.load(line)),
    ):
        with pytest.raises(ValueError, match=r"crossgrain.ScheduledConversion\(model, schedule, total_steps\)"):
            refuse(value)
    with pytest.raises(ValueError, match="the phase 'last 3 steps' makes this a schedule"):
        GemmRecipe("hp", "hp", "hp", rules=["last 3 steps: mxfp8"])


# ---- explain ---------------------------------------------------------------------------------------


def test_explain_shows_when_phases_begin() -> None:
    schedule = RecipeSchedule.load("nvfp4; first 10 steps: hp; last 20 % of steps: fprop: mxfp8; *.lm: hp")
    shown = schedule.explain(Model(), 100)
    assert [phase.start for phase in shown.phases] == [0, 10, 80]
    assert "== from step 80: 'last 20 % of steps'" in str(shown)
    assert str(schedule.recipe_at(80, 100).explain(Model())) in str(shown)
    decided = {(row.gemm, row.layer): row.why for row in shown.phases[-1].explanation.rows}
    assert (
        decided["fprop", "layers.0.attn.q"] == "last 20 % of steps" and decided["fprop", "head.lm"] == "rule 1 (*.lm)"
    )
    assert decided["dgrad", "layers.0.attn.q"] == "default"
    unknown = schedule.explain()
    assert [phase.start for phase in unknown.phases] == [None] * 3
    assert [phase.title for phase in unknown.phases] == ["'first 10 steps'", "no phase", "'last 20 % of steps'"]
    assert [phase.start for phase in RecipeSchedule.load("nvfp4; first 10 steps: hp").explain().phases] == [0, 10]


def test_objects_of_the_language() -> None:
    rule = RecipeSchedule.load("nvfp4; last 3 steps, a: hp").rules[0]
    assert isinstance(rule, PhaseRule) and rule.pattern == "last 3 steps, a"
