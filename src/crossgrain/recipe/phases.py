"""Phases of a schedule: settings that hold for some of the steps of a training run, ``last 10 % of steps: fprop: hp``.

A phase is written like a rule. Instead of a pattern it has steps, or both: ``last 10 % of steps, *.fc1: hp``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NoReturn

from .layer_formats import Settings
from .percent import NUMBER, Percent
from .rules import Matcher, parse_matcher
from .syntax import RecipeSyntaxError, did_you_mean

_STEPS = re.compile(
    rf"(?:(?P<end>first|last)\s+(?:(?P<count>\d+)\s+steps?|(?P<percent>{NUMBER})\s*%\s*of\s+steps)"
    rf"|from\s+(?:step\s+(?P<begin>\d+)|(?P<begin_percent>{NUMBER})\s*%\s*of\s+steps))"
)
_ABOUT_STEPS = re.compile(r"(?:from|until|before|after|since|then|during|while|at)\s.*|(?:.*\s)?ste\w*(?:\s.*)?")
_FORMS = (
    "first {n} steps",
    "last {n} steps",
    "from step {n}",
    "first {n} % of steps",
    "last {n} % of steps",
    "from {n} % of steps",
)
_SAME_AS = {"until": "first {n} steps", "before": "first {n} steps", "after": "from step {n}", "since": "from step {n}"}


@dataclass(frozen=True)
class Steps:
    """Some steps of a training run: ``first 100 steps``, ``last 10 % of steps``, ``from step 1000``.

    Attributes:
        end: which part of the run. "from" is everything from a step on.
        count: a number of steps or a share of all; with "from", the first of the steps, counted from 0.
    """

    end: Literal["first", "last", "from"]
    count: int | Percent

    @property
    def needs_total(self) -> bool:
        """Whether the number of all steps must be known."""
        return self.end == "last" or isinstance(self.count, Percent)

    def span(self, total: int | None) -> tuple[int, int | None]:
        """The first step, and the first one after the last; None if there is no such end.

        A percentage is rounded to the nearest step, so that ``first 40 % of steps`` ends where ``last 60 % of steps``
        begins; but it is always one step at least.

        Args:
            total: the number of all steps; None if it is not known.

        Raises:
            ValueError: the number of all steps is needed.
        """
        if not self.needs_total:
            assert isinstance(self.count, int)
            return (self.count, None) if self.end == "from" else (0, self.count)
        if total is None:
            raise ValueError(f"'{self}': which steps these are depends on the number of all steps; pass total_steps")
        if self.end == "first":
            assert isinstance(self.count, Percent)
            return 0, self.count.of(total)
        if isinstance(self.count, int):
            return max(0, total - self.count), None
        before = self.count.fraction if self.end == "from" else 1 - self.count.fraction
        return min(total - 1, math.floor(total * before + Fraction(1, 2))), None

    def __str__(self) -> str:
        if isinstance(self.count, Percent):
            return f"{self.end} {self.count} of steps"
        return f"from step {self.count}" if self.end == "from" else f"{self.end} {self.count} {_plural(self.count)}"


@dataclass(frozen=True)
class PhaseRule:
    """Settings for some steps.

    Attributes:
        steps: when they hold.
        matcher: for which layers. None is for all layers, and leaves the rules of single layers stronger.
        settings: pairs of keys and values, see `layer_formats`.

    Examples:
        >>> schedule = cg.RecipeSchedule.load("nvfp4; last 10 % of steps: mxfp8")
        >>> schedule.rules[0].pattern
        'last 10 % of steps'
    """

    steps: Steps
    matcher: Matcher | None
    settings: Settings

    def __post_init__(self) -> None:
        if not self.settings:
            raise ValueError(f"the phase '{self.pattern}' sets nothing")

    @property
    def pattern(self) -> str:
        """What is written before the colon."""
        return str(self.steps) if self.matcher is None else f"{self.steps}, {self.matcher}"


def parse_pattern(text: str) -> tuple[Steps | None, Matcher | None]:
    """Parse what is before the colon of a rule or phase: the steps of a phase, and the layers, if they are written.

    Raises:
        RecipeSyntaxError: the text is neither a pattern nor a phase.
    """
    written, comma, pattern = text.partition(",")
    steps = _parse_steps(written)
    if steps is None and comma:
        raise RecipeSyntaxError(
            "before a comma there must be the steps of a phase, as in 'last 10 % of steps, *.fc1: hp'; write | between "
            "patterns",
            text,
            len(text) - len(text.lstrip()),
            len(written),
        )
    if steps is None:
        return None, parse_matcher(text)
    if not comma:
        return steps, None
    try:
        return steps, parse_matcher(pattern)
    except RecipeSyntaxError as error:
        raise error.within(text, len(written) + 1) from None


def refuse_schedule(what: str) -> NoReturn:
    """Raise, because ``what`` belongs to a schedule, where one recipe for all steps is needed."""
    raise ValueError(
        f"{what} makes this a schedule, which changes during training, but one recipe for all steps is needed here. "
        "crossgrain.ScheduledConversion(model, schedule, total_steps) converts a model and follows the schedule; "
        "RecipeSchedule.load(schedule).recipe_at(step, total_steps) is the recipe of a step"
    )


def _parse_steps(text: str) -> Steps | None:
    stripped = text.strip()
    start = len(text) - len(text.lstrip())
    found = _STEPS.fullmatch(stripped)
    if found is None:
        if " " in stripped and _ABOUT_STEPS.fullmatch(stripped):
            raise RecipeSyntaxError(
                f"{stripped!r} is not a phase{_suggestion(stripped)}", text, start, start + max(1, len(stripped))
            )
        return None
    number = found["percent"] or found["begin_percent"]
    try:
        end: Literal["first", "last", "from"] = found["end"] or "from"  # type: ignore[assignment]
        count = Percent.parse(number) if number else int(found["count"] or found["begin"])
        if end == "from" and isinstance(count, Percent) and count.fraction == 1:
            raise ValueError("there is no step after 100 % of steps")
        if end != "from" and count == 0:
            raise ValueError("the number of steps must be at least 1")
    except ValueError as error:
        raise RecipeSyntaxError(str(error), text, start, start + len(stripped)) from None
    return Steps(end, count)


def _suggestion(text: str) -> str:
    numbers = re.findall(NUMBER, text)
    number = numbers[0] if len(numbers) == 1 else "10"
    meant = _SAME_AS.get(text.split()[0])
    if meant is not None and "%" not in text:
        return f"; did you mean {meant.format(n=number)!r}?"
    return did_you_mean(text, [form.format(n=number) for form in _FORMS if "%" in form or "%" not in text])


def _plural(count: int) -> str:
    return "step" if count == 1 else "steps"
