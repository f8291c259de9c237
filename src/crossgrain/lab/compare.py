"""Train with several recipes and with fp32 on the same seeds and data, and compare loss, errors, time and memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..gemm.operands import GEMMS
from ..gpt.data import even_batch, load_text
from ..gpt.model import GPT
from ..gpt.training import Preset, Run, Trainer
from ..recipe import Recipe, RecipeSchedule
from .gemm_errors import Errors, gemm_errors, mean_errors, tensors_of_layers

BASELINE = "fp32"

OnStep = Callable[[str, int, Run], None]  # label, seed and the run so far


@dataclass(frozen=True)
class Row:
    """The results of one recipe. Ratios and the gap are relative to fp32. NaN means not known."""

    label: str
    loss: float  # on validation text, mean over seeds
    gap: float  # mean over seeds, each against fp32 with the same seed
    spread: float  # standard deviation of the gap over seeds
    errors: Errors  # by GEMM, mean over layers
    time: float
    saved: float  # bytes held for backward


@dataclass
class Comparison:
    """The result of `compare`: all runs, by recipe; fp32 comes first.

    `rows` has the results as numbers, `to_dict` everything as plain data, and `picture.draw` draws it.
    """

    preset: Preset
    recipes: Mapping[str, Recipe | RecipeSchedule]  # by label
    seeds: Sequence[int]
    runs: dict[str, list[Run]] = field(default_factory=dict)
    errors: dict[str, dict[str, Errors]] = field(default_factory=dict)  # by recipe and layer
    interrupted: bool = False

    @property
    def labels(self) -> list[str]:
        return [BASELINE, *self.recipes]

    def finished(self, label: str) -> dict[int, Run]:
        """The runs of a recipe that were not interrupted, by seed."""
        return {run.seed: run for run in self.runs.get(label, []) if not run.interrupted}

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
        """One row for each recipe with at least one finished run."""
        return [self._row(label) for label in self.labels if self.finished(label)]

    def _row(self, label: str) -> Row:
        runs, baseline = list(self.finished(label).values()), list(self.finished(BASELINE).values())
        gaps = [gaps[-1][1] for gaps in self.gaps(label).values()]
        errors = mean_errors(self.errors[label]) if label in self.errors else dict.fromkeys(GEMMS, math.nan)
        return Row(
            label=label,
            loss=statistics.mean(run.validation_loss for run in runs),
            gap=statistics.mean(gaps) if gaps else math.nan,
            spread=statistics.stdev(gaps) if len(gaps) > 1 else math.nan,
            errors=dict.fromkeys(GEMMS, 0.0) if label == BASELINE else errors,
            time=_median_ratio([run.seconds_per_step for run in runs], [run.seconds_per_step for run in baseline]),
            saved=_median_ratio([run.saved_bytes for run in runs], [run.saved_bytes for run in baseline]),
        )

    def to_dict(self) -> dict[str, Any]:
        """All results as plain data for JSON. Values that are not known are None."""
        everything: dict[str, Any] = _without_nan(
            {
                "preset": asdict(self.preset),
                "seeds": list(self.seeds),
                "recipes": {label: str(recipe) for label, recipe in self.recipes.items()},
                "interrupted": self.interrupted,
                "rows": [asdict(row) for row in self.rows()],
                "errors": self.errors,
                "runs": {label: [asdict(run) for run in runs] for label, runs in self.runs.items()},
            }
        )
        return everything


def compare(
    preset: Preset,
    recipes: Mapping[str, Recipe | RecipeSchedule],
    seeds: Sequence[int],
    on_step: OnStep | None = None,
) -> Comparison:
    """Train with fp32 and with every recipe, once per seed. Ctrl-C ends it early and keeps the finished runs.

    Args:
        preset: size of the model, and how to train it.
        recipes: the recipes and schedules, by the label to show them under. Errors of GEMMs, and bytes held for
            backward, are those of the first phase of a schedule.
        seeds: the seeds; each gives every recipe the same initial weights and the same data.
        on_step: called after each step with the label, the seed and the run so far.
    """
    result = Comparison(preset, recipes, seeds)
    try:
        for seed in seeds:  # seed by seed: early on there is something to compare
            for label in result.labels:
                trainer = Trainer(preset, recipes.get(label), seed)
                result.runs.setdefault(label, []).append(trainer.run)
                trainer.train(_told(on_step, label, seed))
                if trainer.run.interrupted:
                    raise KeyboardInterrupt
                if label == BASELINE and seed == seeds[0]:
                    exact = trainer.model
                elif seed == seeds[0]:
                    result.errors[label] = _errors(exact, recipes[label], preset)
    except KeyboardInterrupt:
        result.interrupted = True
        for run in (runs[-1] for runs in result.runs.values()):
            run.interrupted = run.interrupted or len(run.losses) < preset.steps
    return result


def _told(on_step: OnStep | None, label: str, seed: int) -> Callable[[Run], None]:
    return lambda run: None if on_step is None else on_step(label, seed, run)


def _errors(model: GPT, recipe: Recipe | RecipeSchedule, preset: Preset) -> dict[str, Errors]:
    if isinstance(recipe, RecipeSchedule):
        recipe = recipe.recipe_at(0, preset.steps)
    torch.manual_seed(0)
    batch = even_batch(load_text().validation, preset.batch, preset.model.context)
    return gemm_errors(model, recipe, tensors_of_layers(model, *batch))


def _median_ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(some) / statistics.median(others) if some and others else math.nan


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities by None: JSON does not have them."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
