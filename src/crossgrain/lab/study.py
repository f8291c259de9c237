"""`study`: measure, calibrate, search, verify and report, from one start and in about the time that is given."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from itertools import count as count_from
from pathlib import Path
from typing import Any

from ..files.durable import whole_file
from ..planning import device_of
from ..recipe import GemmRecipe
from ..runtime.random_numbers import forked_generators
from .distributions import distributions_of
from .progress import OnProgress
from .report import write_report
from .search import Found, frontier, search
from .sensitivity import Sensitivity, sensitivity
from .sensitivity.as_measured import as_measured
from .sensitivity.calibration import calibrate
from .start import Start
from .verify import BranchRun, Verification, verify

SEEDS_OF_CALIBRATION = 2
FEWEST_SEEDS, MOST_SEEDS = 2, 5
_FIRST_SEED = 100  # of verification: others than those of the calibration, which the search has used
_TIMED = 4  # steps by which the time of a run is estimated


@dataclass
class Study:
    """The result of `study`.

    Attributes:
        sensitivity: what each format costs at each site.
        found: the recipe that was found.
        frontier: recipes from nothing saved to everything saved.
        calibration: paired runs of the backward GEMMs; None without a branch.
        verification: paired runs of the recipe, the candidate everywhere and the base; None without a branch.
        files: what was written, by name.
        notes: what has to be known: what was left out, and why.
    """

    sensitivity: Sensitivity
    found: Found
    frontier: Sequence[Any]
    calibration: Verification | None = None
    verification: Verification | None = None
    files: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def study(
    start: Start,
    *,
    base: str | GemmRecipe = "mxfp8",
    candidates: Sequence[str] = ("nvfp4(2d, rht, sr)",),
    target: dict[str, Any] | None = None,
    rules: Sequence[str] = (),
    device: str = "b200",
    tokens: int | None = None,
    scale: float = 1,
    groups: str = "layer",
    count: int = 8,
    minutes: float = 5,
    out: str | os.PathLike[str] = "out",
    on_progress: OnProgress | None = None,
) -> Study:
    """Find a recipe for a model: measure all sites, search, train with the result, and write a report.

    Files in ``out`` are written part by part: an interrupted study goes on where it was, if it is called again.

    Args:
        start: the model, its data and its loop. Without a branch nothing is calibrated or verified, and the result says
            so.
        base: see `sensitivity`.
        candidates: see `sensitivity`; the last one is calibrated, and verified everywhere.
        target: the target of `search`: ``{"saving": 0.8}`` (the default), ``{"max_gap": 0.003}`` or ``{"bytes": ...}``.
        rules: rules of yours that the recipe keeps, see `search`.
        device: see `search`.
        tokens: see `search`.
        scale: see `search`.
        groups: see `sensitivity`.
        count: number of batches.
        minutes: about how long it may take. It decides on the number of seeds, from 2 to 5; what takes longer with two
            seeds is not cut.
        out: directory for sensitivity.json, calibration.json, verification.json, study.json and report.html.
        on_progress: called with the part that is done, from 0 to 1, and a text.

    Raises:
        KeyboardInterrupt: it was stopped by Ctrl-C; the files have what is finished.
        ValueError: something cannot be measured, or the target cannot be reached; see `sensitivity` and `search`.
        BranchError: a run of the branch went wrong; see `verify`.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        >>> batches = [(torch.randn(32, 32), torch.randint(32, (32,))) for _ in range(2)]
        >>> def loss_fn(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> start = cg.lab.Start(model, batches, loss_fn)  # with a loop of yours, the recipe is also verified
        >>> with tempfile.TemporaryDirectory() as root:
        ...     result = cg.lab.study(start, candidates=["nvfp4"], target={"saving": 0.8}, scale=128, out=root)
        >>> sorted(result.files)
        ['numbers', 'report', 'sensitivity']
    """
    device_of(device)  # what is wrong is said before anything has taken time
    plain = GemmRecipe.load(base)
    kept = plain.with_rules([*plain.rules, *rules])  # the base with the rules of the user
    kept.with_blocks_of(start.model)
    candidates = [candidates] if isinstance(candidates, str) else list(candidates)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    start = replace(start, batches=list(islice(start.batches, count)))  # for all parts the same
    clock, tell = _Clock(minutes), on_progress or (lambda part, text: None)
    where: dict[str, Any] = {"device": device, "tokens": tokens, "scale": scale, "rules": rules}

    s = sensitivity(
        start.model,
        start.batches,
        start.loss_fn,
        base=base,
        candidates=candidates,
        optimizer=start.optimizer,
        groups=groups,
        count=count,
        tokens=start.tokens,
        skip=start.skip,
        include=start.include,
        path=folder / "sensitivity.json",
        on_progress=lambda part, text: tell(0.3 * part, text),
    )
    if s.interrupted:
        raise KeyboardInterrupt
    label = candidates[-1]
    calibration, notes, seeds = None, [], FEWEST_SEEDS
    everywhere = as_measured(GemmRecipe.load(dict(s.candidates[label])), s)
    if start.branch is None:
        notes.append("there is no branch, so backward is not priced in nats, and nothing is verified")
    else:
        seeds = clock.seeds(start, everywhere)
        total = SEEDS_OF_CALIBRATION * 3
        calibration = calibrate(
            s,
            start.branch,
            candidate=label,
            seeds=SEEDS_OF_CALIBRATION,
            steps=start.steps,
            path=folder / "calibration.json",
            on_step=_told(lambda part, text: tell(0.3 + 0.25 * part, text), total * start.steps, "calibrating with"),
        )
        if calibration.interrupted:
            raise KeyboardInterrupt
        s.save(folder / "sensitivity.json")
    s = s.only(candidates)  # the file may have others, from an earlier call
    found = search(s, **(target or {"saving": 0.8}), **where)
    points = frontier(s, **where)
    result = Study(s, found, points, calibration, notes=notes)
    if start.branch is not None:
        path = folder / "verification.json"
        recipes = {_free_label(path, found.recipe): found.recipe, f"{label} everywhere": everywhere}
        if plain != GemmRecipe.load("all: hp"):
            recipes[f"{s.base}, the base"] = as_measured(kept, s)
        total = seeds * (1 + len(recipes)) * start.steps
        result.verification = verify(
            start.branch,
            recipes,
            seeds=range(_FIRST_SEED, _FIRST_SEED + seeds),
            steps=start.steps,
            path=path,
            on_step=_told(lambda part, text: tell(0.55 + 0.43 * part, text), total, "verifying"),
        )
        if result.verification.interrupted:
            raise KeyboardInterrupt
    _write(result, start, folder)
    tell(1.0, "done")
    return result


def _free_label(path: Path, recipe: GemmRecipe) -> str:
    """A label for the recipe that was found: "search", or "search 2" if an earlier search found another one."""
    known = Verification.load(path).recipes if path.exists() else {}
    names = chain(["search"], (f"search {number}" for number in count_from(2)))
    return next(name for name in names if known.get(name, str(recipe)) == str(recipe))


def _write(result: Study, start: Start, folder: Path) -> None:
    result.files = {
        "report": folder / "report.html",
        "numbers": folder / "study.json",
        "sensitivity": folder / "sensitivity.json",
    }
    with whole_file(result.files["numbers"]) as temporary:
        temporary.write_text(json.dumps({"found": result.found.to_dict(), "notes": result.notes}, indent=1))
    write_report(
        result.files["report"],
        result.sensitivity,
        frontier=result.frontier,
        found=result.found,
        verification=result.verification,
        distributions=distributions_of(start, result.sensitivity),
        title=f"Where fewer bits are enough: {start.name}",
    )


def _told(tell: OnProgress, total: int, what: str) -> Callable[[BranchRun], None]:
    """Progress of runs, of which ``total`` steps are made in all."""
    done = 0

    def on_step(run: BranchRun) -> None:
        nonlocal done
        done += 1
        tell(min(1.0, done / total), f"{what} {run.label}, seed {run.seed}")

    return on_step


class _Clock:
    """How many seeds there is time for."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def seeds(self, start: Start, recipe: GemmRecipe) -> int:
        """The number of seeds for verification, after some steps in high precision and with a recipe were timed."""
        assert start.branch is not None
        seconds = []
        with forked_generators():
            list(islice(start.branch(recipe, 0), 2))  # kernels are compiled
            for each in (None, recipe):
                begin = time.monotonic()
                list(islice(start.branch(each, 0), _TIMED))
                seconds.append((time.monotonic() - begin) / _TIMED * start.steps)
        exact, rounded = seconds
        left = self._end - time.monotonic() - SEEDS_OF_CALIBRATION * (exact + 2 * rounded)
        return max(FEWEST_SEEDS, min(MOST_SEEDS, int(left / (exact + 3 * rounded))))
