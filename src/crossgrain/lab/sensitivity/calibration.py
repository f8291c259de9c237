"""How many nats the noise of backward is worth: from paired training runs, one for each GEMM."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ...recipe import GemmRecipe
from ..verify import Branch, Verification, verify
from ..verify.running import OnStep
from .as_measured import as_measured
from .result import Sensitivity, Site

BACKWARD = ("dgrad", "wgrad")


def calibrate(
    s: Sensitivity,
    branch: Branch,
    *,
    candidate: str | None = None,
    seeds: int | Iterable[int] = 3,
    steps: int = 60,
    on_step: OnStep | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Verification:
    """Train with dgrad, and with wgrad, of all layers in a candidate's formats, and note the nats per unit of noise.

    A search then adds noise to nats. The gap of a short run is often not distinguishable from none; its mean is used as
    it is, but not below 0. What holds for a candidate that rounds stochastically does not hold for one with bias, whose
    gap grows with the number of steps.

    Args:
        s: the sensitivity; its ``calibration`` is set.
        branch: see `verify`.
        candidate: the label of the candidate; by default the last one.
        seeds: see `verify`.
        steps: see `verify`.
        on_step: see `verify`.
        path: see `verify`.

    Returns:
        The paired runs.

    Raises:
        ValueError: the candidate was not measured, quantizes no backward GEMM, or a run diverged.

    Examples:
        >>> batches = [(torch.randn(32, 32), torch.randint(32, (32,))) for _ in range(2)]
        >>> def loss_fn(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> def branch(recipe, seed):  # a loop of yours, from your checkpoint
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        ...     if recipe is not None:  # None is high precision
        ...         cg.convert(model, recipe)
        ...     while True:
        ...         loss = loss_fn(model, batches[seed])
        ...         loss.backward()
        ...         yield loss.item()
        >>> s = cg.lab.sensitivity(torch.nn.Sequential(torch.nn.Linear(32, 32)), batches, loss_fn, candidates=["nvfp4"])
        >>> runs = cg.lab.calibrate(s, branch, seeds=2, steps=4)
        >>> list(s.calibration)  # the only layer has no dgrad
        ['wgrad']
    """
    label = list(s.candidates)[-1] if candidate is None else candidate
    if label not in s.candidates:
        raise ValueError(f"{label!r} was not measured; there are {', '.join(s.candidates)}")
    formats = s.candidates[label]
    noise = {gemm: _noise(s, gemm, label) for gemm in BACKWARD}
    recipes = {
        f"{gemm}: {formats[gemm]}": as_measured(GemmRecipe.load({"all": "hp", gemm: formats[gemm]}), s)
        for gemm in BACKWARD
        if noise[gemm] > 0
    }
    if not recipes:
        raise ValueError(f"{label!r} quantizes no backward GEMM, so there is no noise to calibrate")
    result = verify(branch, recipes, seeds=seeds, steps=steps, on_step=on_step, path=path)
    for gemm in BACKWARD:
        name = f"{gemm}: {formats[gemm]}"
        if name in recipes and (lost := result.diverged(name)):
            seed, step = next(iter(lost.items()))
            raise ValueError(
                f"training with {name} in all layers diverged at step {step} of seed {seed}, so its noise has no "
                "price in nats. Use another candidate, or keep this GEMM in high precision by a rule"
            )
        if name in recipes and result.finished(name):
            s.calibration[gemm] = max(0.0, result.gap(name).mean) / noise[gemm]
    return result


def _noise(s: Sensitivity, gemm: str, label: str) -> float:
    effects = [s.effects.get(Site(layer, gemm), {}).get(label) for layer in s.layers]
    return sum(effect.noise.mean for effect in effects if effect is not None and effect.noise is not None)
