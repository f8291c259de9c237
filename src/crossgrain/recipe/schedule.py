"""`RecipeSchedule`: a recipe that changes during training, ``nvfp4; last 10 % of steps: mxfp8``.

It is a recipe with phases among its rules. A phase without a pattern changes the settings of the whole recipe while its
steps last, and rules for single layers stay stronger. A phase with a pattern, ``last 10 % of steps, *.fc1: hp``, is a
rule while its steps last, in its place among the rules. Of several phases, later ones win.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import nn

from ..gemm.operands import GEMMS, TENSORS
from .document import Document
from .files import is_recipe_path, read_mapping, write_mapping
from .format_spec import FormatSpec
from .gemm_recipe import GemmRecipe
from .layer_formats import Settings, gemms_of
from .mapping import document_of, make_rule, mapping_of
from .phases import PhaseRule, Steps
from .presets import SCHEDULES, schedule_name
from .rules import Rule
from .text import format_line, left_of_preset, parse_line, parse_rule

if TYPE_CHECKING:
    from .explain_schedule import ScheduleExplanation

_LONG = 1000  # so many times longer than its numbers of steps is a run of which no length is known


@dataclass(frozen=True)
class Phase:
    """A part of a training run in which the recipe stays the same.

    Attributes:
        start: its first step.
        recipe: the recipe of its steps.
        rules: the phases of the schedule that hold in it.

    Examples:
        >>> schedule = cg.RecipeSchedule.load("nvfp4; last 10 % of steps: mxfp8")
        >>> [phase.start for phase in schedule.phases(100)]
        [0, 90]
    """

    start: int
    recipe: GemmRecipe
    rules: tuple[PhaseRule, ...]

    @property
    def label(self) -> str:
        """The phases that hold, as they are written; "no phase" if there is none."""
        return " and ".join(f"'{rule.pattern}'" for rule in self.rules) or "no phase"


@dataclass(frozen=True)
class RecipeSchedule:
    """A recipe that changes during training. It is an immutable, hashable value.

    >>> schedule = RecipeSchedule.load("nvfp4; last 10 % of steps: mxfp8")
    >>> schedule.recipe_at(950, total_steps=1000) == GemmRecipe.load("mxfp8")
    True

    It is not bound to layers itself: `crossgrain.ScheduledConversion` converts a model and follows the schedule.

    Args:
        base: the recipe outside of all phases.
        rules: exceptions for some layers and for some steps: texts like ``"last 10 % of steps: fprop: hp"``, pairs as
            in `GemmRecipe`, or `Rule` and `PhaseRule` objects. They follow those of ``base``.

    Raises:
        ValueError: a rule or phase is wrong, or the operands of a GEMM cannot be multiplied in a phase.
    """

    base: GemmRecipe
    rules: tuple[Rule | PhaseRule, ...] = ()

    def __post_init__(self) -> None:
        rules = (*self.base.rules, *map(_as_rule, self.rules))
        # Rules have one place, so that equal schedules are equal values.
        object.__setattr__(self, "base", self.base.with_rules(()))
        object.__setattr__(self, "rules", rules)
        self.phases(self._long_run())

    @property
    def changes(self) -> bool:
        """Whether there are phases; without them this is one recipe for all steps."""
        return bool(self._phase_rules())

    @property
    def needs_total(self) -> bool:
        """Whether the number of all steps must be known: a phase is a percentage, or is at the end."""
        return any(rule.steps.needs_total for rule in self._phase_rules())

    # ---- recipes of steps ----------------------------------------------------------------------

    def recipe_at(self, step: int, total_steps: int | None = None) -> GemmRecipe:
        """The recipe of a step.

        Args:
            step: number of the step; the first is 0. Steps after the last one belong to the last phase.
            total_steps: number of all steps; needed if `needs_total`.

        Raises:
            ValueError: ``step`` is negative, or the number of all steps is needed.
        """
        if step < 0:
            raise ValueError(f"steps are counted from 0, got {step}")
        _check_total(total_steps)
        if total_steps is not None:
            step = min(step, total_steps - 1)
        return _recipe_with(self, self._holding(step, total_steps))

    def phases(self, total_steps: int | None = None) -> tuple[Phase, ...]:
        """The parts of a run with one recipe each, in their order; the first one starts with step 0.

        Args:
            total_steps: number of all steps; needed if `needs_total`.

        Raises:
            ValueError: the number of all steps is needed, or the operands of a GEMM cannot be multiplied in a phase.
        """
        _check_total(total_steps)
        spans = [rule.steps.span(total_steps) for rule in self._phase_rules()]
        starts = {0, *(place for span in spans for place in span if place is not None)}
        found: list[Phase] = []
        for start in sorted(starts):
            if start and total_steps is not None and start >= total_steps:
                break
            holding = self._holding(start, total_steps)
            recipe = _recipe_with(self, holding)
            if not found or recipe != found[-1].recipe:
                found.append(Phase(start, recipe, tuple(rule for rule in holding if isinstance(rule, PhaseRule))))
        return tuple(found)

    def _phase_rules(self) -> list[PhaseRule]:
        return [rule for rule in self.rules if isinstance(rule, PhaseRule)]

    def _holding(self, step: int, total: int | None) -> tuple[Rule | PhaseRule, ...]:
        """The rules, and those phases that hold in a step."""
        return tuple(rule for rule in self.rules if isinstance(rule, Rule) or _contains(rule.steps, step, total))

    def _long_run(self) -> int:
        """A number of steps of which every phase that is a number of steps is a small part."""
        return _LONG * (
            1 + max([rule.steps.count for rule in self._phase_rules() if isinstance(rule.steps.count, int)], default=1)
        )

    # ---- text and files ------------------------------------------------------------------------

    def __str__(self) -> str:
        return format_line(self.base.settings, self.rules, self.base.set_options)

    def __repr__(self) -> str:
        return f"RecipeSchedule.load({str(self)!r})"

    @classmethod
    def load(cls, value: str | os.PathLike[str] | Mapping[str, Any] | GemmRecipe | RecipeSchedule) -> RecipeSchedule:
        """Load a schedule. Everything that `GemmRecipe.load` takes is a schedule without phases.

        Args:
            value: the name of a preset, a schedule in one line of text, the path of a .yaml, .yml or .json file, or a
                mapping as in such a file. A schedule is returned as it is.

        Raises:
            TypeError: the value is none of these.
            ValueError: the text, file or mapping is not a schedule; `RecipeSyntaxError` points at the mistake.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, GemmRecipe):
            return cls(value)
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if is_recipe_path(value):
            mapping = read_mapping(value)
            try:
                return cls.from_dict(mapping)
            except ValueError as error:
                raise ValueError(f"{value}: {error}") from error
        if not isinstance(value, str):
            raise TypeError(
                "a schedule must be the name of a preset, one line of text, the path of a file or a mapping, got "
                f"{type(value).__name__}"
            )
        return cls._from_document(parse_line(value))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> RecipeSchedule:
        """Make a schedule from a mapping, as `to_dict` returns it. Phases are among its ``rules``.

        Raises:
            ValueError: the mapping is not a schedule.
        """
        return cls._from_document(document_of(mapping))

    def to_dict(self) -> dict[str, Any]:
        """The schedule as a mapping of strings, lists and dicts, as in a file."""
        return mapping_of(self.base.settings, self.rules, self.base.set_options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule to a .yaml, .yml or .json file."""
        write_mapping(self.to_dict(), path)

    @classmethod
    def _from_document(cls, document: Document) -> RecipeSchedule:
        rules, preset, settings, options = document.rules, document.preset, document.settings, document.options
        name = None if preset is None else schedule_name(preset)
        if name is not None:
            inner = parse_line(SCHEDULES[name].line)
            preset, rules = inner.preset, [*inner.rules, *rules]
            settings = {**left_of_preset(inner.settings, settings), **settings}
            options = {**inner.options, **options}
        return cls(GemmRecipe.from_document(Document(preset, settings, options)), tuple(rules))

    # ---- explanation ---------------------------------------------------------------------------

    def explain(
        self, model: nn.Module | None = None, total_steps: int | None = None, *, every_layer: bool = False
    ) -> ScheduleExplanation:
        """Explain which phase begins at which step, and which formats it has.

        Args:
            model: explain the layers of this model; without it, the default and each rule.
            total_steps: number of all steps. If it is needed and not given, phases are shown in the order that they
                have in a long run, without numbers of steps.
            every_layer: as in `GemmRecipe.explain`.

        Returns:
            A table for each phase; print it.
        """
        from .explain_schedule import explain_schedule

        known = total_steps is not None or not self.needs_total
        phases = self.phases(total_steps if known else self._long_run())
        return explain_schedule(str(self), phases, known, model, every_layer=every_layer)


def _contains(steps: Steps, step: int, total: int | None) -> bool:
    start, end = steps.span(total)
    return start <= step and (end is None or step < end)


def _check_total(total: int | None) -> None:
    if total is not None and total < 1:
        raise ValueError(f"the number of all steps must be at least 1, got {total}")


def _as_rule(rule: Any) -> Rule | PhaseRule:
    if isinstance(rule, Rule | PhaseRule):
        return rule
    return parse_rule(rule) if isinstance(rule, str) else make_rule(*rule)


@lru_cache(maxsize=256)
def _recipe_with(schedule: RecipeSchedule, holding: tuple[Rule | PhaseRule, ...]) -> GemmRecipe:
    """The recipe while these phases hold. The same object in every step, so that layers see no change."""
    settings: dict[str, Any] = dict(schedule.base.settings)
    stages = [("default", schedule.base.settings)]
    rules: list[Rule] = []
    phases: list[str] = []
    for rule in holding:
        if isinstance(rule, Rule):
            rules.append(rule)
            continue
        phases.append(rule.pattern)
        if rule.matcher is None:
            settings = _changed(settings, rule.settings)
            stages.append((rule.pattern, rule.settings))
        else:
            rules.append(Rule(rule.matcher, rule.settings))
    try:
        recipe = GemmRecipe.from_document(Document(None, settings, schedule.base.set_options, [*rules]))
    except ValueError as error:
        if not phases:
            raise
        raise ValueError(f"in the phase {' and '.join(map(repr, phases))}: {error}") from None
    return recipe.with_settings_by(stages)


def _changed(settings: Mapping[str, Any], phase: Settings) -> dict[str, Any]:
    """The settings of a recipe after a phase has changed them, as a rule changes those of its layers."""
    result = dict(settings)
    for key, value in phase:  # from the general to the special, as KEYS are
        if key == "all":
            assert isinstance(value, FormatSpec)
            result = _without(result, (*GEMMS, *TENSORS))
            result.update(gemms_of(value))
        else:
            result = _without(result, (key,))
            result[key] = value
    return result


def _without(settings: Mapping[str, Any], places: Iterable[str]) -> dict[str, Any]:
    """Settings without those for ``places`` and for parts of them: ``fprop`` also takes ``fprop.weight`` away."""
    gone = set(places)
    return {key: value for key, value in settings.items() if not {key, key.partition(".")[0]} & gone}
