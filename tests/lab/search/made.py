"""Sensitivities made by hand."""

from __future__ import annotations

import random
from typing import Any

from crossgrain.gemm.operands import GEMMS
from crossgrain.lab.intervals import Estimate
from crossgrain.lab.sensitivity import Sensitivity
from crossgrain.lab.sensitivity.result import Effect, LayerInfo, Site

BASE = "mxfp8"
SR = "nvfp4(rht, sr)"
NEAREST = "nvfp4"
CANDIDATES = {
    BASE: dict.fromkeys(GEMMS, "mxfp8"),
    SR: {"fprop": "nvfp4", "dgrad": "nvfp4(sr)", "wgrad": "nvfp4(rht, sr)"},
    NEAREST: dict.fromkeys(GEMMS, "nvfp4"),
}


def estimate(mean: float, half: float | None = None) -> Estimate:
    half = 0.1 * abs(mean) if half is None else half
    return Estimate(mean, mean - half, mean + half, 8)


def loss(mean: float, half: float | None = None) -> Effect:
    return Effect(loss=estimate(mean, half))


def noise(mean: float, bias: float, half: float | None = None) -> Effect:
    return Effect(noise=estimate(mean, half), bias=estimate(bias, half))


def sensitivity(
    fprop: dict[str, float],
    backward: float = 0.01,
    *,
    sizes: dict[str, tuple[int, int]] | None = None,
    **options: Any,
) -> Sensitivity:
    """Layers by name, with the loss of nvfp4 in fprop. mxfp8 has a tenth of each effect; nearest has more bias."""
    sizes = sizes or {}
    layers = {name: LayerInfo("linear", *sizes.get(name, (4096, 4096)), 8192, group=name) for name in fprop}
    effects = {}
    for name, nats in fprop.items():
        effects[Site(name, "fprop")] = {BASE: loss(nats / 10), SR: loss(nats), NEAREST: loss(nats)}
        for gemm in ("dgrad", "wgrad"):
            effects[Site(name, gemm)] = {
                BASE: noise(backward / 10, backward / 100),
                SR: noise(backward, backward / 20),
                NEAREST: noise(backward / 2, backward / 4),
            }
    return Sensitivity(BASE, CANDIDATES, layers, effects, batches=8, loss=2.0, **options)


def random_sensitivity(rng: random.Random, layers: int, candidates: list[str]) -> Sensitivity:
    """Everything random, also effects below 0."""
    names = [f"blocks.{i // 2}.{('up', 'down')[i % 2]}" for i in range(layers)]
    infos = {
        name: LayerInfo("linear", rng.choice([2048, 4096]), rng.choice([4096, 8192]), 8192, group=name)
        for name in names
    }
    effects: dict[Site, dict[str, Effect]] = {}
    for name in names:
        for label in (BASE, *candidates):
            effects.setdefault(Site(name, "fprop"), {})[label] = loss(rng.gauss(0.3, 1) * 1e-3)
            for gemm in ("dgrad", "wgrad"):
                effects.setdefault(Site(name, gemm), {})[label] = noise(rng.random() * 1e-2, rng.gauss(0.5, 1) * 1e-3)
    formats = {label: CANDIDATES.get(label, dict.fromkeys(GEMMS, label)) for label in (BASE, *candidates)}
    return Sensitivity(BASE, formats, infos, effects, batches=8, loss=2.0)
