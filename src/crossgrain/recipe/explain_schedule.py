"""Explain a schedule: which phase begins when, and the table of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from .explain import Explanation, explain

if TYPE_CHECKING:
    from .schedule import Phase


@dataclass(frozen=True)
class ExplainedPhase:
    """One phase of a `ScheduleExplanation`.

    Attributes:
        start: its first step; None if that depends on the number of all steps, which is not known.
        label: the phases of the schedule that hold in it.
        explanation: its recipe as a table.
    """

    start: int | None
    label: str
    explanation: Explanation

    @property
    def title(self) -> str:
        """When it begins, and why."""
        return f"{self.label}" if self.start is None else f"from step {self.start}: {self.label}"


@dataclass(frozen=True)
class ScheduleExplanation:
    """What `RecipeSchedule.explain` returns. Print it to see when phases begin, and a table for each.

    Attributes:
        title: the schedule as text.
        phases: the phases in their order.

    Examples:
        >>> shown = cg.RecipeSchedule.load("nvfp4; last 10 % of steps: mxfp8").explain(None, 100)
        >>> [phase.start for phase in shown.phases]
        [0, 90]
    """

    title: str
    phases: list[ExplainedPhase]

    def __str__(self) -> str:
        parts = [self.title, *(f"== {phase.title}\n{phase.explanation}" for phase in self.phases)]
        return "\n\n".join(parts)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [Text(self.title)]
        for phase in self.phases:
            parts += [Text(""), Text(phase.title, style="bold green"), phase.explanation]
        return Group(*parts)


def explain_schedule(
    title: str, phases: Sequence[Phase], steps_known: bool, model: nn.Module | None, *, every_layer: bool
) -> ScheduleExplanation:
    """See `RecipeSchedule.explain`."""
    explained = [
        ExplainedPhase(
            phase.start if steps_known else None, phase.label, explain(phase.recipe, model, every_layer=every_layer)
        )
        for phase in phases
    ]
    return ScheduleExplanation(title, explained)
