"""Does the lab tell the truth? Compare its predictions with what paired training runs show.

    python examples/lab_truth.py --layers 2 --steps 1500          # about ten minutes
    python examples/lab_truth.py --layers 4 --steps 1500

1. Train the small GPT in fp32, and measure its sensitivity to NVFP4.
2. For each layer, measure the loss of the forward pass with fprop of this layer alone in NVFP4.
3. For each layer, train branches with fprop of this layer alone in NVFP4: the paired gap is the truth.
4. Train branches with dgrad in NVFP4, rounded to nearest and stochastically: does squared bias rank them rightly?
5. Search a recipe that saves 80 %, and train branches with it and with random recipes of the same saving, on new seeds.

``--parts forward,fprop,dgrad,search`` runs some of them. What is finished is kept in ``--out`` and not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from crossgrain import GemmRecipe, convert, unconvert
from crossgrain.gpt import GPTConfig
from crossgrain.lab import Sensitivity, calibrate, search, sensitivity, verify
from crossgrain.lab.gpt_checkpoint import GPTCheckpoint

BASE = "hp"
CANDIDATES = ("nvfp4", "nvfp4(2d, rht, sr)")
PARTS = ("forward", "fprop", "dgrad", "search")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--width", type=int, default=128)
    arguments.add_argument("--steps", type=int, default=1500, help="training steps before the measurement")
    arguments.add_argument("--branch", type=int, default=60, help="steps of a branch")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--parts", default=",".join(PARTS))
    arguments.add_argument("--out", type=Path, default=Path("out/truth"))
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    out = chosen.out / f"{chosen.layers}x{chosen.width}x{chosen.steps}"
    out.mkdir(parents=True, exist_ok=True)

    start = trained(chosen.layers, chosen.width, chosen.steps, out)
    model, optimizer = start.restored()
    s = sensitivity(
        model,
        start.batches(8),
        start.loss,
        base=BASE,
        candidates=CANDIDATES,
        optimizer=optimizer,
        include="head",
        path=out / "sensitivity.json",
    )
    found: dict[str, object] = {"layers": chosen.layers, "steps": chosen.steps, "loss": s.loss}
    parts = {"forward": forward, "fprop": fprop, "dgrad": dgrad, "search": searched}
    for part in chosen.parts.split(","):
        found[part] = parts[part](start, s, out, chosen.branch, chosen.seeds)
        print(json.dumps({part: found[part]}, indent=1), flush=True)
    (out / "truth.json").write_text(json.dumps(found, indent=1))


def trained(layers: int, width: int, steps: int, out: Path) -> GPTCheckpoint:
    start = GPTCheckpoint(GPTConfig(layers, width, 4, width), batch=8, learning_rate=2e-3, include=("head",))
    path = out / "checkpoint.pt"
    if path.exists():
        start.load(path)
    else:
        start.train(steps, lambda step, loss: print(f"step {step}: {loss:.3f}") if step % 250 == 0 else None)
        start.save(path)
    return start


def only(layer: str, gemm: str, fmt: str) -> GemmRecipe:
    """A recipe in which one GEMM of one layer is quantized."""
    return GemmRecipe("hp", "hp", "hp", rules=[(layer, {gemm: fmt})])


def forward(start: GPTCheckpoint, s: Sensitivity, out: Path, steps: int, seeds: int) -> object:
    """Predicted against measured loss of the forward pass, on the batches of the measurement."""
    model, _ = start.restored()
    batches = start.batches(8)
    rows = {}
    with torch.no_grad():
        exact = [float(start.loss(model, batch)) for batch in batches]
        for layer in s.layers:
            convert(model, only(layer, "fprop", "nvfp4"), include="head")
            losses = [float(start.loss(model, batch)) for batch in batches]
            unconvert(model)
            effect = s.effect(layer, "fprop", "nvfp4")
            assert effect.loss is not None and effect.first is not None
            rows[layer] = (effect.loss.mean + effect.first.mean, statistics.fmean(losses) - statistics.fmean(exact))
    predicted, measured = zip(*rows.values(), strict=True)
    return {
        "rows": rows,
        "pearson": statistics.correlation(predicted, measured),
        "sum ratio": sum(predicted) / sum(measured),
    }


def fprop(start: GPTCheckpoint, s: Sensitivity, out: Path, steps: int, seeds: int) -> object:
    """Predicted loss against the paired gap of training, site by site."""
    recipes = {layer: only(layer, "fprop", "nvfp4") for layer in s.layers}
    result = verify(start.branch(steps), recipes, seeds=seeds, steps=steps, path=out / "fprop.json")
    rows = {}
    for layer in s.layers:
        effect = s.effect(layer, "fprop", "nvfp4").loss
        assert effect is not None
        gap = result.gap(layer)
        rows[layer] = (effect.mean, gap.mean, gap.half_width)
    predicted, gaps, _ = zip(*rows.values(), strict=True)
    return {"rows": rows, "spearman": spearman(predicted, gaps), "sum ratio": sum(gaps) / sum(predicted)}


def dgrad(start: GPTCheckpoint, s: Sensitivity, out: Path, steps: int, seeds: int) -> object:
    """Squared bias and the paired gap of 300 steps, rounded to nearest and stochastically."""
    formats = {"nvfp4": "nvfp4", "nvfp4(2d, rht, sr)": "nvfp4(2d, sr)"}
    recipes = {label: GemmRecipe("hp", fmt, "hp") for label, fmt in formats.items()}
    result = verify(start.branch(300), recipes, seeds=seeds, steps=300, path=out / "dgrad.json")
    rows: dict[str, object] = {}
    for label in recipes:
        effects = [s.effect(layer, "dgrad", label) for layer in s.layers]
        rows[label] = {
            "noise": sum(effect.noise.mean for effect in effects if effect.noise is not None),
            "bias": sum(effect.bias.mean for effect in effects if effect.bias is not None),
            "gap": (result.gap(label).mean, result.gap(label).half_width),
        }
    difference = result.gap("nvfp4", "nvfp4(2d, rht, sr)")
    return {"rows": rows, "nearest minus stochastic": (difference.mean, difference.half_width)}


def searched(start: GPTCheckpoint, s: Sensitivity, out: Path, steps: int, seeds: int) -> object:
    """The recipe of the search and random recipes that save as much, on seeds that nothing was chosen by."""
    options: dict[str, Any] = {"device": "b200", "tokens": 16384, "scale": 32}
    only_one = s.only(CANDIDATES[-1:])  # so that random recipes have the same choice
    calibrate(only_one, start.branch(steps), seeds=seeds, steps=steps, path=out / "calibration.json")
    found = search(only_one, saving=0.8, **options)
    recipes = {"search": found.recipe}
    for number in range(3):
        recipes[f"random {number}"] = random_recipe(only_one, 0.8, number)
    result = verify(start.branch(steps), recipes, seeds=range(20, 20 + seeds), steps=steps, path=out / "search.json")
    gaps = {label: (result.gap(label).mean, result.gap(label).half_width) for label in recipes}
    others = statistics.fmean(gaps[label][0] for label in recipes if label != "search")
    return {
        "recipe": str(found.recipe),
        "saving": found.saving,
        "calibration": only_one.calibration,
        "predicted": found.predicted.mean,
        "gaps": gaps,
        "search / random": gaps["search"][0] / others,
        "measured / predicted": gaps["search"][0] / found.predicted.mean,
    }


def random_recipe(s: Sensitivity, saving: float, number: int) -> GemmRecipe:
    """A recipe that moves random sites until it saves so much of the time, as if GEMM time followed the sizes."""
    sites = list(s.sites())
    random.Random(number).shuffle(sites)
    size = {site: s.layers[site.layer].inputs * s.layers[site.layer].outputs for site in sites}
    label = next(label for label in s.candidates if label != s.base)
    rules: dict[str, dict[str, str]] = {}
    moved = 0
    for site in sites:
        if moved >= saving * sum(size.values()):
            break
        moved += size[site]
        rules.setdefault(site.layer, {})[site.gemm] = s.candidates[label][site.gemm]
    return GemmRecipe("hp", "hp", "hp", rules=list(rules.items()))


def spearman(some: Sequence[float], others: Sequence[float]) -> float:
    """Spearman's correlation: that of the ranks."""
    return statistics.correlation(ranks(some), ranks(others))


def ranks(values: Sequence[float]) -> list[int]:
    order = sorted(values)
    return [order.index(value) for value in values]


if __name__ == "__main__":
    main()
