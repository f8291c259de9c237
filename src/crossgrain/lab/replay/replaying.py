"""`replay`: repeat a step bit for bit, and then with operands in high precision, to find what makes a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..progress import OnProgress, Progress
from .looking import Look, Site
from .outcome import MEASURES, Outcome, difference, distances
from .result import Operand, Replay
from .running import Made, Runs
from .search import ENOUGH, Found, OutOfRuns, search
from .step import LossFunction, ReplayStep

_A_SPIKE = 0.05  # a loss that differs by more than this share is what is to be explained
_ROUNDING = {"loss": 1e-6, "gradient norm": 1e-5, "gradient": 1e-10, "loss after the update": 1e-6}
"""Differences that are as small, relative to high precision, come from the order of sums in fp32."""
_FEWEST_RUNS = 8


def replay(
    model: nn.Module,
    batches: list[Any],
    loss_fn: LossFunction,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    update: Callable[[], object] | None = None,
    random_state: Mapping[str, Any] | None = None,
    measure: str = "auto",
    runs: int = 64,
    redraws: int = 2,
    expected_loss: float | None = None,
    on_progress: OnProgress | None = None,
) -> Replay:
    """Find out which operand of which GEMM makes a step differ from high precision.

    The step is run twice as it is, which must give the same bits; once with all operands in high precision; and then
    with some operands in high precision, and everything else as it was: the same seeds of stochastic rounding, the same
    scales of delayed scaling, the same dropout. At the end the model, its gradients, the optimizer and all random
    number generators are as they were before. Ctrl-C ends it and returns what is there.

    Args:
        model: the model, right before the step: converted, or of crossgrain's modules, with ``loss_fn`` entering an
            autocast. Compiled models run as they are written.
        batches: the microbatches of the step, whose gradients add up; mostly one: ``[batch]``.
        loss_fn: ``loss_fn(model, batch)`` returns the loss of a microbatch, divided as the training loop divides it.
        optimizer: the optimizer with its state, to see what the update does to the loss; None not to look at that.
        update: what the loop does after backward: clipping, ``optimizer.step()``. By default ``optimizer.step()``.
        random_state: the states of the random number generators at the beginning of the step, as
            `crossgrain.files.random_state.get_random_state` returns them; None for the present states.
        measure: what is to be explained: "loss"; "gradient norm"; "gradient", the distance to the gradient in high
            precision; "loss after the update"; "nonfinite", the number of NaNs and infinities. "auto" takes the last
            if there are some, then a loss that differs by more than 5 %, then the gradient.
        runs: the most runs of the step.
        redraws: so many runs with other draws of stochastic rounding, if there is any: is it chance?
        expected_loss: the loss that the training run had in this step, to compare it bit for bit.
        on_progress: called with the part that is done, from 0 to 1, and a text. By default a terminal shows a bar.

    Returns:
        The operands that make the difference, and how much of it each explains.

    Raises:
        ReplayError: the step is not the same when it is repeated.
        ValueError: nothing is quantized in this step; the loss is not a number that depends on the parameters; or an
            option is wrong.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        >>> batches = [(torch.randn(32, 32), torch.randint(32, (32,))) for _ in range(2)]
        >>> def loss_fn(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> _ = cg.convert(model, "nvfp4")
        >>> result = cg.lab.replay(model, batches[:1], loss_fn, runs=8)
        >>> print(result)  # with more runs it names the operands
        The step was repeated bit for bit.
        ...
    """
    if measure not in ("auto", *MEASURES):
        raise ValueError(f"measure must be auto, {', '.join(MEASURES)}, got {measure!r}")
    if runs < _FEWEST_RUNS:
        raise ValueError(f"runs must be at least {_FEWEST_RUNS}, got {runs}")
    step = ReplayStep(model, batches, loss_fn, optimizer, update)
    if measure == "loss after the update" and optimizer is None:
        raise ValueError("the loss after the update is not known without the optimizer: pass it")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"replay runs in one process, and this one is one of {dist.get_world_size()}: load the checkpoint in a "
            "single process and replay the step there"
        )
    with Runs(step, random_state).of_present_state() as made, Progress("replay", on_progress) as progress:
        progress.total = runs
        return _Replaying(made, progress, runs, redraws).done(measure, expected_loss)


class _Replaying:
    def __init__(self, runs: Runs, progress: Progress, budget: int, redraws: int) -> None:
        self._runs, self._progress, self._budget, self._redraws = runs, progress, budget, redraws
        self._known: dict[frozenset[Site], Outcome] = {}
        self._result: Replay
        self._sites: list[Site] = []

    def done(self, measure: str, expected_loss: float | None) -> Replay:
        low, look = self._runs.twice()
        self._progress.add(2, "as it was")
        if not look.sites:
            raise ValueError(_nothing_quantized(look))
        self._sites = list(look.sites)
        high = self._runs.raised(self._sites)
        self._progress.add(1, "in high precision")
        self._runs.high = high
        low, high = self._runs.compared(low), self._runs.compared(high)
        result = self._result = Replay(
            low.outcome,
            high.outcome,
            not_examined=look.fixed,
            roundings=look.sites,
            first_nonfinite=look.first_nonfinite,
            parameters=_parameters(low, high),
            expected_loss=expected_loss,
            budget=self._budget,
        )
        del low, high, look
        try:
            self._explain(measure)
        except KeyboardInterrupt:
            result.interrupted = True
        result.runs = self._runs.count
        return result

    def _explain(self, measure: str) -> None:
        result = self._result
        result.measure = _chosen_measure(measure, result)
        after = result.high.loss_after if result.measure == "loss after the update" else None
        if result.high.nonfinite or (after is not None and not math.isfinite(after)):
            result.verdict = "not precision"
            return
        whole = difference(result.measure, result.low, result.high)
        if whole <= _smallest_difference(result.measure, result.high):
            result.verdict = "no difference"
            return
        if self._runs.draws.count:
            for variant in range(1, self._redraws + 1):
                result.other_draws.append(self._runs.raised((), variant=variant).outcome)
                self._progress.add(1, "other draws")
        if _is_chance(result, whole):
            result.verdict = "chance"
            return
        found = Found()
        try:
            search(self._sites, self._explained, found)
        finally:
            self._take(found)
        if result.culprits:
            others = [site for site in self._sites if site not in result.culprits]
            result.alone = 1 - self._share_of(self._runs.raised(others).outcome)

    def _take(self, found: Found) -> None:
        result = self._result
        formats = {site: rounding.format for site, rounding in result.roundings.items()}
        result.operands = sorted(
            (Operand(*site, formats[site], share) for site, share in found.single.items()), key=lambda one: -one.share
        )
        result.kinds, result.groups = found.kinds, sorted(found.groups, key=lambda group: -group[1])
        result.culprits, result.share, result.complete = found.culprits, found.share, found.complete
        result.verdict = "spread" if found.complete else "unfinished"
        if result.culprits:
            result.verdict = "one operand" if len(result.culprits) == 1 else "several operands"

    def _explained(self, sites: Collection[Site]) -> float:
        """The share of the difference that disappears when some operands are raised."""
        key = frozenset(sites)
        if key not in self._known:
            if self._runs.count >= self._budget - 1:  # the last run is for the culprits alone
                raise OutOfRuns
            self._known[key] = self._runs.raised(key).outcome
            self._progress.add(1, f"{len(key)} of {len(self._sites)} operands raised")
        return self._share_of(self._known[key])

    def _share_of(self, outcome: Outcome) -> float:
        result = self._result
        left, whole = (difference(result.measure, one, result.high) for one in (outcome, result.low))
        if math.isinf(whole):
            return 0.0 if math.isinf(left) else 1.0
        return 1 - left / whole


def _chosen_measure(measure: str, result: Replay) -> str:
    low, high = result.low, result.high
    if measure != "auto":
        return measure
    if low.nonfinite:
        return "nonfinite"
    for name, value in (("loss", high.loss), ("loss after the update", high.loss_after)):
        if value is not None and difference(name, low, high) > _A_SPIKE * abs(value):
            return name
    return "gradient"


def _smallest_difference(measure: str, high: Outcome) -> float:
    """The difference that the order of sums in fp32 can make."""
    if measure == "nonfinite":
        return 0.0
    scale = {
        "loss": high.loss,
        "gradient norm": high.gradient_norm,
        "gradient": high.gradient_norm**2,
        "loss after the update": high.loss_after or 0.0,
    }[measure]
    return _ROUNDING[measure] * abs(scale)


def _is_chance(result: Replay, whole: float) -> bool:
    """Whether other draws of stochastic rounding make most of the difference disappear."""
    left = [difference(result.measure, other, result.high) for other in result.other_draws]
    return bool(left) and all(each <= (1 - ENOUGH) * whole for each in left)


def _parameters(low: Made, high: Made) -> dict[str, tuple[float, float, float]]:
    """Norms of the gradients of each parameter, the largest difference first."""
    found = {}
    for name, apart in distances(low.gradients, high.gradients).items():
        own, other = (float(each[name].double().norm()) if name in each else 0.0 for each in (low[1], high[1]))
        found[name] = (own, other, apart)
    return dict(sorted(found.items(), key=lambda item: -item[1][2] if math.isfinite(item[1][2]) else -math.inf))


def _nothing_quantized(look: Look) -> str:
    if look.fixed:
        site, why = next(iter(look.fixed.items()))
        return f"none of the {len(look.fixed)} quantized operands of this step can be raised; {site}: {why}"
    return (
        "no operand of a GEMM was quantized in this step, so there is nothing to raise. Pass a converted model, or "
        "enter the autocast in loss_fn; loss_fn must use the model that it gets"
    )
