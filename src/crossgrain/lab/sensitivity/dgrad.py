"""dgrad: what the error of one group of layers does to the gradients of all parameters before it.

No local quantity predicts it, so each group takes a forward and backward pass of its own in every batch, in which only
its dgrad is in the formats of the candidate.
"""

from __future__ import annotations

import glob

from torch import Tensor

from ...gemm.operands import GEMMS
from ...recipe import GemmRecipe
from ...recipe.layer_formats import make_settings
from ...recipe.rules import Glob, Rule
from ..intervals import Estimate, estimate
from .borrowed import HIGH_PRECISION
from .candidates import Candidate
from .result import Effect
from .run import Run
from .sketch import common_part, inner_products, scaled


def _groups(run: Run, candidate: Candidate) -> dict[str, list[str]]:
    """The groups with the layers whose dgrad a candidate quantizes."""
    groups: dict[str, list[str]] = {}
    for layer, info in run.result.layers.items():
        if candidate.quantizes(layer, info.module_type, "dgrad"):
            groups.setdefault(info.group, []).append(layer)
    return groups


def passes_of_dgrad(run: Run, candidate: Candidate) -> int:
    """How many forward and backward passes a batch takes: one for each group, and one in high precision."""
    groups = len(_groups(run, candidate))
    return groups + 1 if groups else 0


def measure_dgrad(run: Run, candidate: Candidate) -> None:
    """Measure noise and bias of dgrad, group by group."""
    groups = _groups(run, candidate)
    measured = {layer for layers in groups.values() for layer in layers}
    for layer in run.result.layers.keys() - measured:
        run.note(layer, "dgrad", candidate, Effect(noise=run.exact(), bias=run.exact()))
    recipes = {group: _only_dgrad(run, candidate, layers) for group, layers in groups.items()}
    squares: dict[str, list[float]] = {group: [] for group in groups}
    sketches: dict[str, list[Tensor]] = {group: [] for group in groups}
    try:
        for at in range(len(run.batches) if groups else 0):
            run.backward(at)
            exact = run.take_gradients()
            run.progress.add(1, f"{candidate.label}: dgrad")
            for group, layers in groups.items():
                square, sketch = _error_of_group(run, at, layers, recipes[group], exact)
                squares[group].append(square)
                sketches[group].append(sketch)
                run.progress.add(1, f"{candidate.label}: dgrad of {group}")
    finally:  # also of what was done before Ctrl-C
        for group, layers in groups.items():
            if len(squares[group]) >= 2:
                _note(run, candidate, layers, squares[group], sketches[group])


def _only_dgrad(run: Run, candidate: Candidate, layers: list[str]) -> GemmRecipe:
    """A recipe in which only dgrad of some layers is quantized."""
    rules = []
    for layer in layers:
        formats = candidate.layer_formats(layer, run.result.layers[layer].module_type)
        settings = {f"dgrad.{tensor}": formats.format("dgrad", tensor).value for tensor in GEMMS["dgrad"]}
        rules.append(Rule(Glob((glob.escape(layer),)), make_settings(settings)))  # by its name, whatever is in it
    return GemmRecipe("hp", "hp", "hp", rules=rules, allow_mixed=True)


def _error_of_group(
    run: Run, at: int, layers: list[str], recipe: GemmRecipe, exact: dict[str, Tensor]
) -> tuple[float, Tensor]:
    run.lent.bind(layers, recipe)
    try:
        run.backward(at)
    finally:
        run.lent.bind(layers, HIGH_PRECISION)
    return run.square_and_sketch(run.take_gradients(), minus=exact)


def _note(run: Run, candidate: Candidate, layers: list[str], squares: list[float], sketches: list[Tensor]) -> None:
    """Note the effect of a group. Each of its layers gets the same share, so that they add up to that of the group."""
    unit = 1 / (run.result.gradient_variance * len(layers))
    noise = estimate([square * unit for square in squares])
    bias: Estimate = scaled(common_part(inner_products(sketches)), unit)
    for layer in layers:
        run.note(layer, "dgrad", candidate, Effect(noise=noise, bias=bias))
