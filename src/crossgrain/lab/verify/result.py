"""`Verification`: all runs of `verify`, what they show, and as a JSON file."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...files.durable import whole_file
from ..intervals import Estimate
from .paired import DIVERGED, Paired, by_step, paired

VERSION = 1
HIGH_PRECISION = "high precision"  # the label of no recipe
_POINTS_SHOWN = 12  # curves are smoothed to about this many independent points


@dataclass
class BranchRun:
    """The losses of one run of a branch.

    Attributes:
        label: of the recipe.
        seed: the seed.
        control: the run is a second one of its recipe and seed, with other draws of stochastic rounding.
        losses: of each step, as far as they are finite.
        diverged_at: the step, counted from 1, whose loss was not finite; None if all were.
        seconds: time of the run.
    """

    label: str
    seed: int
    control: bool = False
    losses: list[float] = field(default_factory=list)
    diverged_at: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    """What the runs of one recipe show.

    Attributes:
        label: of the recipe.
        loss: mean of its last losses over seeds; NaN if no run is finished.
        paired: the differences to the baseline; None for the baseline, if a run diverged, or if no pair is finished.
        verdict: of `Paired`, or `DIVERGED`; None for the baseline, and without a tolerance.
        diverged: for each seed whose run diverged, the step.
    """

    label: str
    loss: float
    paired: Paired | None
    verdict: str | None
    diverged: dict[int, int]


@dataclass
class Verification:
    """The result of `verify`.

    Attributes:
        recipes: the text of each recipe by its label, without the baseline; None for high precision.
        baseline: label of what gaps are measured against.
        baseline_recipe: its text; None for high precision.
        seeds: the seeds.
        steps: losses in a run.
        last: how many of them, from the end, the gap is the mean of.
        tolerance: the largest gap that would be accepted, or None.
        runs: all finished and all diverged runs.
        interrupted: it was stopped early. What is there is valid.
    """

    recipes: dict[str, str | None]
    baseline: str
    baseline_recipe: str | None
    seeds: list[int]
    steps: int
    last: int
    tolerance: float | None = None
    runs: list[BranchRun] = field(default_factory=list)
    interrupted: bool = False

    @property
    def labels(self) -> list[str]:
        """The labels of all recipes; the baseline comes first."""
        return [self.baseline, *(label for label in self.recipes if label != self.baseline)]

    # ---- runs and their differences --------------------------------------------------------------------------

    def run(self, label: str, seed: int, control: bool = False) -> BranchRun | None:
        """The run of a recipe and a seed, or None if it was not run."""
        for run in self.runs:
            if (run.label, run.seed, run.control) == (label, seed, control):
                return run
        return None

    def finished(self, label: str, control: bool = False) -> dict[int, BranchRun]:
        """The runs of a recipe that did not diverge, by seed.

        Raises:
            KeyError: there is no such recipe.
        """
        self._check(label)
        found = ((seed, self.run(label, seed, control)) for seed in self.seeds)
        return {seed: run for seed, run in found if run is not None and run.diverged_at is None}

    def diverged(self, label: str) -> dict[int, int]:
        """For each seed whose run of a recipe diverged, the step."""
        self._check(label)
        return {run.seed: run.diverged_at for run in self.runs if run.label == label and run.diverged_at is not None}

    def differences(self, label: str, against: str | None = None) -> dict[int, list[float]]:
        """The loss of a recipe minus that of another one, by seed and step.

        Args:
            label: the recipe.
            against: the other one; the baseline by default.
        """
        return _differences(self.finished(label), self.finished(self.baseline if against is None else against))

    # ---- what they show --------------------------------------------------------------------------------------

    def paired(self, label: str, against: str | None = None) -> Paired:
        """Everything that is tested about the difference of two recipes.

        Args:
            label: the recipe.
            against: the other one; the baseline by default.

        Raises:
            KeyError: there is no such recipe.
            ValueError: a run of one of them diverged, or no pair is finished.
        """
        for name in (label, against):
            if name is not None and name != self.baseline and (found := self.diverged(name)):
                seed, step = next(iter(found.items()))
                raise ValueError(
                    f"{name} diverged with seed {seed} at step {step}: a gap over the seeds that are left would be "
                    "that of its luckier runs"
                )
        differences = self.differences(label, against)
        if not differences:
            raise ValueError(f"no pair of runs of {label} and {against or self.baseline} is finished")
        if self.ignores_seeds():
            differences = dict([next(iter(differences.items()))])  # one run, however often it was repeated
        return paired(differences, last=self.last, tolerance=self.tolerance)

    def ignores_seeds(self) -> bool:
        """Whether the baseline has the same losses with all seeds, so that they are repetitions of one run."""
        losses = [run.losses for run in self.finished(self.baseline).values()]
        return len(losses) > 1 and all(one == losses[0] for one in losses[1:])

    def gap(self, label: str, against: str | None = None) -> Estimate:
        """The gap between two recipes: the mean over the last steps, with its interval over seeds.

        Args:
            label: the recipe.
            against: the other one; the baseline by default.

        Raises:
            KeyError: there is no such recipe.
            ValueError: a run of one of them diverged, or no pair is finished.
        """
        return self.paired(label, against).gap

    def curve(self, label: str, against: str | None = None, smooth: int | None = None) -> list[Estimate]:
        """The gap at each step, with its interval over seeds; empty if no pair is finished.

        Args:
            label: the recipe.
            against: the other one; the baseline by default.
            smooth: each point is the mean of this many steps; by default a twelfth of the run.
        """
        width = max(1, self.steps // _POINTS_SHOWN) if smooth is None else smooth
        return by_step(self.differences(label, against), width)

    def control(self, label: str) -> Paired | None:
        """The second runs of a recipe minus the first ones; None if it has none. The tolerance has no part in it."""
        differences = _differences(self.finished(label, control=True), self.finished(label))
        return paired(differences, last=self.last) if differences else None

    def row(self, label: str) -> Row:
        """What the runs of one recipe show."""
        diverged = self.diverged(label)
        losses = [statistics.fmean(run.losses[-self.last :]) for run in self.finished(label).values()]
        found = None
        if label != self.baseline and not diverged and self.differences(label):
            found = self.paired(label)
        verdict = DIVERGED if diverged else None if found is None else found.verdict
        return Row(label, statistics.fmean(losses) if losses else math.nan, found, verdict, diverged)

    def rows(self) -> list[Row]:
        """One row for each recipe with a run; the baseline comes first."""
        return [self.row(label) for label in self.labels if any(run.label == label for run in self.runs)]

    def __str__(self) -> str:
        from .text import shown

        return shown(self)

    def _check(self, label: str) -> None:
        if label not in self.labels:
            raise KeyError(f"there is no recipe {label!r}; there are: {', '.join(self.labels)}")

    # ---- files -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON. Numbers that are not known, and infinite ends of intervals, are None."""
        from .claims import claims

        may, may_not = claims(self)
        everything: dict[str, Any] = finite(
            {
                "verification": VERSION,
                "baseline": self.baseline,
                "baseline_recipe": self.baseline_recipe,
                "recipes": self.recipes,
                "seeds": self.seeds,
                "steps": self.steps,
                "last": self.last,
                "tolerance": self.tolerance,
                "interrupted": self.interrupted,
                "rows": [asdict(row) for row in self.rows()],
                "controls": {
                    label: asdict(control) for label in self.labels if (control := self.control(label)) is not None
                },
                "may_be_claimed": may,
                "may_not_be_claimed": may_not,
                "runs": [asdict(run) for run in self.runs],
            }
        )
        return everything

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verification:
        """The result that `to_dict` wrote. What the runs show is computed again.

        Raises:
            ValueError: the data is of another version, or is not such a result.
        """
        if data.get("verification") != VERSION:
            found = data.get("verification")
            raise ValueError(f"this is not a verification of version {VERSION}: its version is {found!r}")
        try:
            return cls(
                recipes=dict(data["recipes"]),
                baseline=data["baseline"],
                baseline_recipe=data["baseline_recipe"],
                seeds=list(data["seeds"]),
                steps=data["steps"],
                last=data["last"],
                tolerance=data["tolerance"],
                runs=[BranchRun(**run) for run in data["runs"]],
                interrupted=data["interrupted"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not a verification: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a JSON file, which is whole or not there."""
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Verification:
        """Read a file that `save` wrote.

        Raises:
            ValueError: it is not such a file.
        """
        try:
            data = json.loads(Path(path).read_text())
            if not isinstance(data, dict):
                raise ValueError("this is not a verification: it is not a JSON object")
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def finite(value: Any) -> Any:
    """Plain data with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _differences(some: Mapping[int, BranchRun], others: Mapping[int, BranchRun]) -> dict[int, list[float]]:
    return {seed: _minus(run.losses, others[seed].losses) for seed, run in some.items() if seed in others}


def _minus(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [loss - other for loss, other in zip(some, others, strict=True)]
