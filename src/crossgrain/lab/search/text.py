"""The text of `Found`."""

from __future__ import annotations

from collections import Counter

from ...gemm.operands import GEMMS
from ...planning.report import duration, size
from ..tables import aligned
from .found import Found, Tie

_SHOWN = 5  # ties


def table(found: Found) -> str:
    """The recipe, what it saves, what it costs, and which sites have moved."""
    lines = [
        f"target: {found.target}",
        f"recipe: {found.recipe}",
        "",
        f"saving     {found.saving:.3f} of what can be saved: GEMMs take {duration(found.seconds)}, with the base "
        f"{duration(found.base_seconds)}",
        *(
            f"{name:<10} {size(found.bytes[name])}, with the base {size(found.base_bytes[name])}"
            for name in found.bytes
        ),
        f"predicted  {found.predicted} nats per token above high precision, with the base {found.base_predicted}",
        "",
        *_sites(found),
    ]
    if found.ties:
        lines += ["", f"moves that the measurement cannot tell from another one: {len(found.ties)}"]
        lines += [f"  {_tie(tie)}" for tie in found.ties[:_SHOWN]]
        lines += ["  ..."] if len(found.ties) > _SHOWN else []
    if found.notes:
        lines += ["", *(f"- {note}" for note in found.notes)]
    return "\n".join(lines)


def _sites(found: Found) -> list[str]:
    labels = list(dict.fromkeys(found.chosen.values()))
    counts = Counter((site.gemm, label) for site, label in found.chosen.items())
    rules = Counter(site.gemm for site in found.fixed)
    head = ["sites", *labels, "by rules", "noise", "bias"]
    rows = [
        [
            gemm,
            *(str(counts[gemm, label]) for label in labels),
            str(rules[gemm]),
            str(found.noise.get(gemm, "")),
            str(found.bias.get(gemm, "")),
        ]
        for gemm in GEMMS
    ]
    return aligned([head, *rows], numbers=True)


def _tie(tie: Tie) -> str:
    return (
        f"{tie.moved} in {tie.label} ({tie.effect} {tie.unit}), {tie.other} in {tie.other_label} ({tie.other_effect})"
    )
