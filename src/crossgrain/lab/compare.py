"""Train with several recipes and with fp32 on the same seeds and data, and compare loss, time and memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..gpt.training import Preset, Run, Trainer
from ..recipe import Recipe, RecipeSchedule
from .verify.paired import DIVERGED, Paired, paired
from .verify.result import finite

BASELINE = "fp32"

OnStep = Callable[[str, int, Run], None]  # label, seed and the run so far


@dataclass(frozen=True)
class Row:
    """The results of one recipe. NaN means not known.

    Attributes:
        label: of the recipe.
        loss: on validation text after the last step, mean over seeds.
        paired: validation losses minus those of fp32 with the same seed: the gap after the last step with its interval,
            tests, and growth. None for fp32, if a run diverged, or if no pair is finished.
        verdict: of `Paired`, or `DIVERGED`; None for fp32, and without a tolerance.
        diverged: for each seed whose run diverged, the step.
        time: of a step, relative to fp32.
        saved: bytes held for backward, relative to fp32.
    """

    label: str
    loss: float
    paired: Paired | None
    verdict: str | None
    diverged: dict[int, int]
    time: float
    saved: float


@dataclass
class Comparison:
    """The result of `compare`: all runs, by recipe; fp32 comes first.

    `rows` has the results as numbers, `to_dict` everything as plain data, and `picture.draw` draws it.
    """

    preset: Preset
    recipes: Mapping[str, Recipe | RecipeSchedule]  # by label
    seeds: Sequence[int]
    tolerance: float | None = None
    runs: dict[str, list[Run]] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def labels(self) -> list[str]:
        return [BASELINE, *self.recipes]

    def finished(self, label: str) -> dict[int, Run]:
        """The runs of a recipe that were not interrupted and did not diverge, by seed."""
        return {run.seed: run for run in self._done(label) if diverged_at(run) is None}

    def diverged(self, label: str) -> dict[int, int]:
        """For each seed whose run of a recipe diverged, the step."""
        return {run.seed: step for run in self._done(label) if (step := diverged_at(run)) is not None}

    def _done(self, label: str) -> list[Run]:
        return [run for run in self.runs.get(label, []) if not run.interrupted]

    def gaps(self, label: str) -> dict[int, list[tuple[int, float]]]:
        """Validation loss minus that of fp32 with the same seed, by seed: a list of (step, difference)."""
        baseline = self.finished(BASELINE)
        return {
            seed: [
                (step, loss - exact)
                for (step, loss), (_, exact) in zip(run.validation, baseline[seed].validation, strict=True)
            ]
            for seed, run in self.finished(label).items()
            if seed in baseline
        }

    def rows(self) -> list[Row]:
        """One row for each recipe with at least one run that was not interrupted."""
        return [self._row(label) for label in self.labels if self._done(label)]

    def _row(self, label: str) -> Row:
        runs, baseline = list(self.finished(label).values()), list(self.finished(BASELINE).values())
        diverged, gaps = self.diverged(label), self.gaps(label)
        found = None
        if label != BASELINE and gaps and not diverged:  # the gap of the seeds that are left would be too small
            found = paired(
                {seed: [gap for _, gap in points] for seed, points in gaps.items()},
                last=1,
                positions=[step for step, _ in next(iter(gaps.values()))],
                tolerance=self.tolerance,
            )
        return Row(
            label=label,
            loss=statistics.mean(run.validation_loss for run in runs) if runs and not diverged else math.nan,
            paired=found,
            verdict=DIVERGED if diverged else None if found is None else found.verdict,
            diverged=diverged,
            time=_median_ratio([run.seconds_per_step for run in runs], [run.seconds_per_step for run in baseline]),
            saved=_median_ratio([run.saved_bytes for run in runs], [run.saved_bytes for run in baseline]),
        )

    def to_dict(self) -> dict[str, Any]:
        """All results as plain data for JSON. Values that are not known are None."""
        everything: dict[str, Any] = finite(
            {
                "preset": asdict(self.preset),
                "seeds": list(self.seeds),
                "recipes": {label: str(recipe) for label, recipe in self.recipes.items()},
                "tolerance": self.tolerance,
                "interrupted": self.interrupted,
                "rows": [asdict(row) for row in self.rows()],
                "runs": {label: [asdict(run) for run in runs] for label, runs in self.runs.items()},
            }
        )
        return everything


def compare(
    preset: Preset,
    recipes: Mapping[str, Recipe | RecipeSchedule],
    seeds: Sequence[int],
    on_step: OnStep | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Train with fp32 and with every recipe, once per seed. Ctrl-C ends it early and keeps the finished runs.

    Args:
        preset: size of the model, and how to train it.
        recipes: the recipes and schedules, by the label to show them under. Bytes held for backward are those of the
            first phase of a schedule.
        seeds: the seeds; each gives every recipe the same initial weights and the same data.
        on_step: called after each step with the label, the seed and the run so far.
        tolerance: the largest gap that would be accepted, in nats per byte. With it there are verdicts.

    Examples:
        >>> size = cg.gpt.GPTConfig(layers=1, width=32, heads=1, context=32)
        >>> preset = cg.gpt.Preset(size, batch=2, steps=2, learning_rate=1e-3, validations=1, validation_batch=1)
        >>> result = cg.lab.compare(preset, {"mxfp8": cg.GemmRecipe.load("mxfp8")}, seeds=[0])
        >>> [row.label for row in result.rows()]
        ['fp32', 'mxfp8']
    """
    result = Comparison(preset, recipes, seeds, tolerance)
    try:
        for seed in seeds:  # seed by seed: early on there is something to compare
            for label in result.labels:
                trainer = Trainer(preset, recipes.get(label), seed)
                result.runs.setdefault(label, []).append(trainer.run)
                trainer.train(_told(on_step, label, seed))
                if trainer.run.interrupted:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        result.interrupted = True
        for run in (runs[-1] for runs in result.runs.values()):
            run.interrupted = run.interrupted or len(run.losses) < preset.steps
    return result


def diverged_at(run: Run) -> int | None:
    """The first step of a run whose loss, or whose validation loss, is not finite; None if all are."""
    steps = [step for step, loss in enumerate(run.losses, 1) if not math.isfinite(loss)]
    steps += [step for step, loss in run.validation if not math.isfinite(loss)]
    return min(steps, default=None)


def _told(on_step: OnStep | None, label: str, seed: int) -> Callable[[Run], None]:
    return lambda run: None if on_step is None else on_step(label, seed, run)


def _median_ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(some) / statistics.median(others) if some and others else math.nan
