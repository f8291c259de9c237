"""`verify`: run a user's training loop with several recipes, in pairs, and keep every run that is finished."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...runtime.random_numbers import draws_by_layer, forked_generators
from .labels import AnyRecipe, Loaded, labelled, loaded, text_of
from .result import BranchRun, Verification

Branch = Callable[[Any, int], Iterable[Any]]
"""``branch(recipe, seed)``: a training loop that yields the loss of each step, from the same start for every recipe."""

OnStep = Callable[[BranchRun], None]


class BranchError(RuntimeError):
    """A branch raised, ended early or yielded what is not a loss.

    Attributes:
        verification: all runs that were finished before.
    """

    def __init__(self, message: str, verification: Verification) -> None:
        super().__init__(message)
        self.verification = verification


def verify(
    branch: Branch,
    recipes: Iterable[AnyRecipe] | Mapping[str, AnyRecipe],
    *,
    seeds: int | Iterable[int] = 3,
    steps: int = 60,
    baseline: AnyRecipe = None,
    tolerance: float | None = None,
    last: int | None = None,
    control: bool | str = False,
    on_step: OnStep | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Verification:
    """Train with each recipe and in high precision, on the same seeds and data, and test the gaps.

    Each run has its own random numbers: torch's default generator begins with those of the seed, for every recipe
    alike; stochastic rounding does not draw from it (`crossgrain.draws_by_layer`). So data and dropout stay paired,
    also if the branch takes them from the default generator.

    Ctrl-C ends it early and keeps the runs that are finished.

    Args:
        branch: called with a recipe (None for high precision; a `RecipeSchedule` if the recipe has phases) and a seed.
            It starts from the same weights for every recipe, takes its data by the seed, and yields the loss of each
            step. It is not asked for more than ``steps`` losses.
        recipes: recipes in any form that `convert` takes, or schedules; or such recipes by label.
        seeds: number of seeds (0, 1, ...), or the seeds.
        steps: losses to take of each run.
        baseline: what gaps are measured against; high precision by default.
        tolerance: the largest gap that would be accepted, in the unit of the loss. With it there are verdicts.
        last: the gap is the mean over this many steps at the end; by default the second half of the run.
        control: also run the baseline and the first recipe (or that of this label) against themselves, on the same data
            with other draws of stochastic rounding.
        on_step: called after each step with the run so far.
        path: a JSON file that is written after each run. If it exists, runs that are in it are not run again; more
            recipes and seeds may be added to it.

    Returns:
        All runs, and what they show. A run whose loss is not finite ends there, and is reported as diverged.

    Raises:
        BranchError: the branch raised, ended before ``steps`` losses, or yielded what is not a number. The runs that
            were finished are in its attribute ``verification``, and in the file.
        ValueError: a recipe or a number is wrong, or the file is that of another set-up.

    Examples:
        >>> def branch(recipe, seed):  # a loop of yours, from your checkpoint
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        ...     if recipe is not None:  # None is high precision
        ...         cg.convert(model, recipe)
        ...     optimizer, data = torch.optim.AdamW(model.parameters()), torch.Generator().manual_seed(seed)
        ...     while True:
        ...         x = torch.randn(32, 32, generator=data)
        ...         loss = (model(x) - x).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         yield loss.item()
        >>> result = cg.lab.verify(branch, ["nvfp4", "mxfp8"], seeds=2, steps=4, tolerance=0.005)
        >>> [row.label for row in result.rows()]  # ``print(result)`` says what they show
        ['high precision', 'nvfp4', 'mxfp8']
    """
    result, work = _set_up(recipes, seeds, steps, baseline, tolerance, last, control, path)
    try:
        for label, recipe, seed, again in work:
            if result.run(label, seed, again) is None:
                run = BranchRun(label, seed, again)
                _run(branch, recipe, run, result, on_step)
                result.runs.append(run)
                if path is not None:
                    result.save(path)
    except KeyboardInterrupt:
        result.interrupted = True
    if path is not None:
        result.save(path)
    return result


Work = list[tuple[str, Loaded, int, bool]]  # label, recipe, seed, whether it is a control


def _set_up(
    recipes: Iterable[AnyRecipe] | Mapping[str, AnyRecipe],
    seeds: int | Iterable[int],
    steps: int,
    baseline: AnyRecipe,
    tolerance: float | None,
    last: int | None,
    control: bool | str,
    path: str | os.PathLike[str] | None,
) -> tuple[Verification, Work]:
    last = max(1, steps // 2) if last is None else last
    if not 1 <= last <= steps:
        raise ValueError(f"a gap needs at least one step of at least one, got last={last} of steps={steps}")
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise ValueError(f"a tolerance must be above 0 and finite, got {tolerance}")
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"seeds must be a number of at least 1, or seeds that differ, got {seeds!r}")

    base = loaded(baseline)
    before = Verification.load(path) if path is not None and Path(path).exists() else None
    known = {} if before is None else {before.baseline: before.baseline_recipe, **before.recipes}
    base_label = next(iter(labelled([baseline], known)))
    found = labelled(recipes, {**known, base_label: text_of(base)})
    if base_label in found:
        raise ValueError(f"{base_label!r} is the baseline; control=True compares it with itself")
    texts = {label: text_of(recipe) for label, recipe in found.items()}
    result = Verification(texts, base_label, text_of(base), chosen, steps, last, tolerance)
    if before is not None:
        _take_over(before, result, os.fspath(path))  # type: ignore[arg-type]

    everything = {base_label: base, **found}
    again = _controls(control, base_label, list(found))
    work: Work = []
    for seed in chosen:  # seed by seed: early on there is something to compare
        work += [(label, recipe, seed, False) for label, recipe in everything.items()]
        work += [(label, everything[label], seed, True) for label in again]
    return result, work


def _take_over(before: Verification, result: Verification, path: str) -> None:
    """Put all that a file has into the result, or raise if the file is that of another set-up."""
    different = [
        f"{name} {old!r} there and {new!r} here"
        for name, old, new in (
            ("steps", before.steps, result.steps),
            ("baseline", before.baseline_recipe or before.baseline, result.baseline_recipe or result.baseline),
        )
        if old != new
    ]
    if different:
        raise ValueError(
            f"{path} has the runs of another set-up: {'; '.join(different)}. Remove the file, or give another path"
        )
    result.recipes = {**before.recipes, **result.recipes}
    result.seeds = [*before.seeds, *(seed for seed in result.seeds if seed not in before.seeds)]
    result.runs = list(before.runs)


def _controls(control: bool | str, baseline: str, labels: list[str]) -> list[str]:
    if not control:
        return []
    if isinstance(control, str):
        if control not in labels:
            raise ValueError(f"control: there is no recipe {control!r}; there are: {', '.join(labels) or 'none'}")
        return [baseline, control]
    return [baseline, *labels[:1]]


# ---- one run ---------------------------------------------------------------------------------------------------------


def _run(branch: Branch, recipe: Loaded, run: BranchRun, result: Verification, on_step: OnStep | None) -> None:
    begin = time.perf_counter()
    with _random_numbers(run.seed, run.control):
        losses: Any = None
        try:
            losses = _called(branch, recipe, run, result)
            while len(run.losses) < result.steps and run.diverged_at is None:
                loss = _number(_next(losses, run, result), run, result)
                if math.isfinite(loss):
                    run.losses.append(loss)
                else:
                    run.diverged_at = len(run.losses) + 1
                if on_step is not None:
                    on_step(run)
        finally:
            if isinstance(losses, Generator):
                losses.close()  # its model is not needed any longer, and what it opened is closed
    run.seconds = time.perf_counter() - begin


@contextmanager
def _random_numbers(seed: int, control: bool) -> Iterator[None]:
    """Random numbers of a run: data and dropout by the seed alone, rounding by the seed and whether it is a control."""
    with forked_generators(), draws_by_layer(_mixed(f"rounding {seed} {control}")):
        # Not the seed itself, which branches give to generators of their own.
        torch.manual_seed(_mixed(f"torch {seed}"))
        yield


def _mixed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _called(branch: Branch, recipe: Loaded, run: BranchRun, result: Verification) -> Iterator[Any]:
    try:
        losses = branch(recipe, run.seed)
    except Exception as error:
        raise BranchError(f"{_place(run)}: the branch raised {_said(error)}", result) from error
    try:
        return iter(losses)
    except TypeError:
        raise BranchError(
            f"{_place(run)}: a branch must yield losses, as a generator does, but it returned {type(losses).__name__}",
            result,
        ) from None


def _next(losses: Iterator[Any], run: BranchRun, result: Verification) -> Any:
    try:
        return next(losses)
    except StopIteration:
        raise _ended_early(run, result) from None
    except Exception as error:
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            raise _ended_early(run, result) from error  # a generator in which next(batches) found no more
        raise BranchError(f"{_place(run)}: the branch raised {_said(error)}", result) from error


def _ended_early(run: BranchRun, result: Verification) -> BranchError:
    return BranchError(
        f"{_place(run)}: the branch ended after {len(run.losses)} of {result.steps} losses. Give it enough batches, or "
        "ask for fewer steps",
        result,
    )


def _number(loss: Any, run: BranchRun, result: Verification) -> float:
    try:
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        raise BranchError(
            f"{_place(run)}: a branch must yield a number for each step, but it yielded {type(loss).__name__}", result
        ) from None


def _place(run: BranchRun) -> str:
    return f"{run.label}, seed {run.seed}, step {len(run.losses) + 1}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
