"""`sensitivity`: measure what each candidate costs at each site of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...recipe import GemmRecipe
from ...runtime.random_numbers import draws_by_layer
from ..progress import OnProgress, Progress
from .borrowed import borrowed
from .candidates import Candidate, base_of, candidates_of
from .dgrad import measure_dgrad, passes_of_dgrad
from .groups import Grouping
from .one_pass import UNITS, UNITS_OF_A_CANDIDATE, measure_in_one_pass
from .reference import measure_reference
from .result import Sensitivity, Site
from .run import LossFunction, Run
from .tokens import TokenCount


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    base: str | GemmRecipe = "mxfp8",
    candidates: Sequence[str] = ("nvfp4(rht, sr)",),
    optimizer: torch.optim.Optimizer | None = None,
    groups: Grouping = "layer",
    count: int = 8,
    tokens: TokenCount = None,
    skip: Any = (),
    include: Any = (),
    path: str | os.PathLike[str] | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Sensitivity:
    """Measure which GEMM of which layer can be in which format, at the model's current weights.

    The model runs in high precision, is not trained, and is afterwards as it was before. Ctrl-C ends the measurement
    and returns what is there.

    Args:
        model: the model, plain or converted. A model that is compiled cannot be seen into: pass the one inside.
        batches: batches of training data. The first ``count`` of them are used, several times.
        loss_fn: ``loss_fn(model, batch)`` returns the mean negative log-likelihood of the tokens of a batch, which is
            what cross entropy is.
        base: the recipe that sites stay in if no candidate is chosen. It is measured, too.
        candidates: formats like ``nvfp4(rht, sr)``, or recipes with a format for each GEMM.
        optimizer: the optimizer of the training run, whose second moments weigh noise and bias as Adam does.
        groups: which layers are measured together in dgrad, which needs a pass for each group: "layer", "block",
            "kind", or a function from the name of a layer to that of its group.
        count: number of batches; 8 give a reliable order.
        tokens: number of tokens that the loss of a batch is the mean of: a number, or a function of the batch. By
            default, the labels that torch's cross entropy gets; if it gets none, the rows of linear layers.
        skip: layers to leave alone, as in `convert`.
        include: layers to measure that stay in high precision by default, such as the output head; as in `convert`.
        path: a JSON file to write results to after each part. If it is there already, what it has is not measured
            again.
        seed: seed of stochastic rounding and of dropout.
        on_progress: called with the part that is done, from 0 to 1, and a text. By default a terminal shows a bar.

    Returns:
        The effects of all candidates at all sites, with intervals over batches.

    Raises:
        ValueError: the model has no linear layer, there are fewer than two batches, a loss is not a finite number, a
            candidate cannot be measured, or ``path`` has results of something else.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        >>> batches = [(torch.randn(32, 32), torch.randint(32, (32,))) for _ in range(2)]
        >>> def loss_fn(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> s = cg.lab.sensitivity(model, batches, loss_fn, candidates=["nvfp4"])
        >>> list(s.layers), list(s.candidates)  # ``print(s)`` shows what each of them costs
        (['0', '2'], ['mxfp8', 'nvfp4'])
    """
    base_candidate = base_of(base)
    chosen = [base_candidate, *_others([candidates] if isinstance(candidates, str) else candidates, base_candidate)]
    taken = _batches(batches, count)
    result = Sensitivity(base_candidate.label, {one.label: one.formats for one in chosen}, batches=len(taken))
    known = _known(path, result)
    with (
        borrowed(model, skip=skip, include=include) as lent,
        draws_by_layer(seed),
        Progress("sensitivity", on_progress) as progress,
    ):
        run = Run(lent, taken, loss_fn, tokens, optimizer, seed, result, progress)
        result.notes += [note for note in (*lent.notes, run.weights.note) if note]
        if len(taken) < count:
            result.notes.append(f"there were only {len(taken)} batches instead of {count}; intervals are wider")
        result.included, result.skipped = lent.included, lent.skipped
        try:
            _measure_all(run, chosen, groups, known, path)
        except KeyboardInterrupt:
            result.interrupted = True
        finally:
            _save(result, path)
    return result


def _others(texts: Iterable[str], base: Candidate) -> list[Candidate]:
    """The candidates that are not the base.

    Raises:
        ValueError: one has the text of the base and means something else.
    """
    found = candidates_of(texts)
    for one in found:
        if one.label == base.label and one.recipe != base.recipe:
            raise ValueError(
                f"{one.label!r} means the preset as a base and the format as a candidate. Write the base as it is "
                f"meant: base={str(base.recipe)!r}"
            )
    return [one for one in found if one.label != base.label]


def _measure_all(
    run: Run,
    chosen: list[Candidate],
    grouping: Grouping,
    known: Sensitivity | None,
    path: str | os.PathLike[str] | None,
) -> None:
    layers = run.lent.module_types
    for layer, kind in layers.items():
        for candidate in chosen:
            candidate.quantizers(layer, kind)  # raises before anything has taken time
    run.progress.total = 10 * len(run.batches)  # until it is known what has to be measured
    measure_reference(run, grouping)
    if known is not None:
        assert path is not None
        _take_over(known, run.result, path)
    one_pass = [one for one in chosen if not _has(run.result, one, ("fprop", "wgrad"))]
    dgrad = [one for one in chosen if not _has(run.result, one, ("dgrad",))]
    units = 1 + (UNITS if one_pass else 0) + UNITS_OF_A_CANDIDATE * len(one_pass)
    run.progress.total = len(run.batches) * (units + sum(passes_of_dgrad(run, one) for one in dgrad))
    measure_in_one_pass(run, one_pass)
    for candidate in dgrad:
        _save(run.result, path)
        measure_dgrad(run, candidate)


def _save(result: Sensitivity, path: str | os.PathLike[str] | None) -> None:
    if path is not None and result.effects:
        result.save(path)


def _take_over(known: Sensitivity, result: Sensitivity, path: str | os.PathLike[str]) -> None:
    """Begin with what an earlier measurement has: also candidates that are not asked for now, and the calibration.

    Raises:
        ValueError: it was not of the same model, weights, data, optimizer, groups and seed.
    """
    if known.fingerprint != result.fingerprint:
        raise ValueError(
            f"{os.fspath(path)} has results of something else: another model, other weights, batches or groups, "
            "another optimizer or seed. Losses or gradients in high precision differ. Choose another path, or delete it"
        )
    result.candidates = {**known.candidates, **result.candidates}
    result.effects = {site: dict(effects) for site, effects in known.effects.items()}
    result.calibration = dict(known.calibration)
    for layer, reason in known.left_out.items():
        result.left_out.setdefault(layer, reason)


def _has(result: Sensitivity, candidate: Candidate, gemms: Sequence[str]) -> bool:
    """Whether everything of some GEMMs is there, from all batches."""
    found = {
        site: result.effects[site][candidate.label]
        for site in (Site(layer, gemm) for layer in result.layers for gemm in gemms)
        if candidate.label in result.effects.get(site, {})
    }
    counts = [value.count for effect in found.values() for value in vars(effect).values() if value is not None]
    return {site.layer for site in found} == set(result.layers) and min(counts, default=0) >= result.batches


def _batches(batches: Iterable[Any], count: int) -> list[Any]:
    if count < 2:
        raise ValueError(f"count must be at least 2, got {count}: intervals need several batches")
    taken = list(islice(batches, count))
    if len(taken) < 2:
        raise ValueError(f"sensitivity needs at least two batches, but batches had only {len(taken)}")
    return taken


def _known(path: str | os.PathLike[str] | None, wanted: Sensitivity) -> Sensitivity | None:
    """Earlier results in a file.

    Raises:
        ValueError: they are of another base, or candidates of these labels mean something else there.
    """
    if path is None or not Path(path).exists():
        return None
    known = Sensitivity.load(path)
    same = known.base == wanted.base and all(
        known.candidates.get(label, formats) == formats for label, formats in wanted.candidates.items()
    )
    if not same:
        raise ValueError(
            f"{os.fspath(path)} has results for the base {known.base!r} and {', '.join(known.candidates)}. Choose "
            "another path, or delete the file"
        )
    return known
