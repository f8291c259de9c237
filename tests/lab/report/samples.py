"""Results to show in reports: like those of small and large models, and decided by a seed."""

import math
import random

from crossgrain.lab.intervals import Estimate
from crossgrain.lab.sensitivity import Effect, LayerInfo, Sensitivity, Site
from crossgrain.lab.verify import BranchRun, Verification
from crossgrain.recipe import GemmRecipe

GEMMS = ("fprop", "dgrad", "wgrad")
FORMATS = {
    "mxfp8": dict.fromkeys(GEMMS, "mxfp8"),
    "nvfp4": {"fprop": "nvfp4", "dgrad": "nvfp4(sr)", "wgrad": "nvfp4(rht, sr)"},
    "nvfp4, nearest": {"fprop": "nvfp4", "dgrad": "nvfp4", "wgrad": "nvfp4"},
}
_STRENGTH = {"mxfp8": 0.03, "nvfp4": 1.0, "nvfp4, nearest": 0.8}
_BIAS = {"mxfp8": 0.002, "nvfp4": 0.1, "nvfp4, nearest": 1.0}
SMALL = [
    f"blocks.{i}.{name}" for i in range(2) for name in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
] + ["head"]
LARGE = [
    f"model.layers.{i}.{name}"
    for i in range(32)
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
]  # fmt: skip


def interval(mean, relative, rng):
    half = abs(mean) * relative * rng.uniform(0.5, 1.5) + 2e-6
    return Estimate(mean, mean - half, mean + half, 8)


def sensitivity(layers=SMALL, seed=0):
    rng = random.Random(seed)
    result = Sensitivity("mxfp8", FORMATS, batches=8, loss=1.4817)
    for number, layer in enumerate(layers):
        result.layers[layer] = LayerInfo("linear", 128, 512, 4096)
        first = math.exp(-3 * number / len(layers))
        draws = {gemm: rng.lognormvariate(0, 0.9) for gemm in GEMMS}
        for gemm in GEMMS:
            result.effects[Site(layer, gemm)] = {
                label: Effect(loss=interval(0.03 / len(layers) * 9 * first * draws[gemm] * strength, 0.25, rng))
                if gemm == "fprop"
                else Effect(
                    noise=interval(0.03 * draws[gemm] * strength, 0.2, rng),
                    bias=interval(0.006 * draws[gemm] * _BIAS[label], 0.4, rng),
                )
                for label, strength in _STRENGTH.items()
            }
    return result


def frontier(result, points):
    """Sites go to nvfp4 one after the other: first all of backward, then forward, the cheapest first."""
    sites = list(result.sites())
    loss = {site: result.effects[site]["nvfp4"].loss for site in sites if site.gemm == "fprop"}
    order = [site for site in sites if site.gemm != "fprop"] + sorted(loss, key=lambda site: loss[site].mean)
    found = []
    for count in sorted({round(i * len(order) / (points - 1)) for i in range(points)}):
        moved = order[:count]
        nats = sum(loss[site].mean for site in moved if site in loss)
        half = 2e-4 + math.sqrt(sum(loss[site].half_width ** 2 for site in moved if site in loss))
        found.append(
            {
                "saving": count / len(order) * 0.86,
                "predicted": [nats, nats - half, nats + half],
                "recipe": recipe_of(result, moved),
                "chosen": dict.fromkeys(moved, "nvfp4"),
            }
        )
    return found


def recipe_of(result, moved):
    by_layer = {}
    for site in moved:
        by_layer.setdefault(site.layer, []).append(site.gemm)
    groups = {}
    for layer, gemms in by_layer.items():
        settings = ", ".join(f"{gemm}: {FORMATS['nvfp4'][gemm]}" for gemm in GEMMS if gemm in gemms)
        groups.setdefault(settings, []).append(layer)
    return "; ".join(["mxfp8", *(f"{'|'.join(layers)}: {settings}" for settings, layers in groups.items())])


def verification(recipes, tolerance=0.005, seeds=3, steps=60, seed=0):
    """Runs of recipes: for each label a text, its gap, how much that grows in a step, and whether seed 1 diverges."""
    rng = random.Random(seed)
    texts = {label: str(GemmRecipe.load(text)) for label, (text, *_) in recipes.items()}
    result = Verification(texts, "high precision", None, list(range(seeds)), steps, steps // 2, tolerance)
    for each in range(seeds):
        exact = [1.5 - 0.001 * step + rng.gauss(0, 0.05) for step in range(steps)]
        result.runs.append(BranchRun("high precision", each, losses=exact))
        for label, (_, gap, growth, diverges) in recipes.items():
            level = gap + rng.gauss(0, 0.0006)
            losses = [loss + level + growth * step + rng.gauss(0, 0.0015) for step, loss in enumerate(exact)]
            diverges = diverges and each == 1
            result.runs.append(
                BranchRun(label, each, losses=losses[:17] if diverges else losses, diverged_at=18 if diverges else None)
            )
    return result


def distributions(layers, seed=0):
    rng = random.Random(seed)
    return [
        {
            "layer": layer,
            "tensor": tensor,
            "direction": direction,
            "counted": "blocks by the exponent of their scale",
            "histogram": {
                -14 + i: round(4000 * math.exp(-((i - 6) ** 2) / 8) * rng.uniform(0.8, 1.2)) for i in range(14)
            },
            "statistics": {
                "amax": rng.uniform(1, 9),
                "kurtosis": rng.uniform(3, 40),
                "format": "nvfp4",
                "snr_db": None,
            },
        }
        for layer in layers
        for tensor in ("input", "weight", "grad_output")
        for direction in ("rowwise", "columnwise")
    ]


def small_report():
    """What `write_report` takes, for 27 sites."""
    result = sensitivity()
    points = frontier(result, 20)
    runs = verification(
        {
            "found": (points[14]["recipe"], 0.0028, 0.0, False),
            "nvfp4": (points[-1]["recipe"], 0.118, 0.0003, False),
            "mxfp8": ("mxfp8", 0.0006, 0.0, False),
        }
    )
    return {
        "sensitivity": result,
        "frontier": points,
        "found": points[14],
        "verification": runs,
        "distributions": distributions(SMALL),
    }


def large_report():
    """What `write_report` takes, for 672 sites, 3 candidates and 60 points of a frontier."""
    result = sensitivity(LARGE)
    points = frontier(result, 60)
    runs = verification(
        {
            "found": (points[48]["recipe"], 0.012, 0.0, False),
            "all nvfp4": ("nvfp4", 0.15, 0.0002, False),
            "mxfp8": ("mxfp8", 0.001, 0.0, False),
            "mxfp4": ("mxfp4", 0.2, 0.0, True),
        },
        tolerance=0.014,
    )
    return {"sensitivity": result, "frontier": points, "verification": runs, "distributions": distributions(LARGE)}
