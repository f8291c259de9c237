"""A sensitivity as a table of text."""

from __future__ import annotations

from collections.abc import Callable

from ...gemm.operands import GEMMS
from ..intervals import Estimate
from ..tables import aligned
from .result import Effect, Sensitivity, Site

_MOST_LAYERS = 40  # a longer table shows the most sensitive layers
_Part = Callable[[Effect], Estimate | None]
_COLUMNS = ("fprop", "dgrad noise", "bias²", "wgrad noise", "bias²")


def table(s: Sensitivity, width: int | None = None) -> str:
    """All effects as text: a table for each candidate, and what has to be known about the numbers.

    Args:
        s: the sensitivity.
        width: columns of the terminal. Intervals are left out where a table would be wider, those of the bias first.
    """
    state = " (stopped early)" if s.interrupted else ""
    lines = [
        f"{len(s.layers)} layers, {s.batches} batches{state}; loss in high precision: {s.loss:.4f} nats per token",
        "fprop: rise of the loss in thousandths of nats; noise and bias² of the gradient in % of a batch's variance;",
        "± is a 95 % interval over batches. Each GEMM of each layer alone, against high precision",
    ]
    for label in s.candidates:
        lines += ["", *_narrowed(s, label, width)]
    for layer, reason in s.left_out.items():
        lines.append(f"{layer}: {reason}")
    return "\n".join([*lines, *s.notes])


def _narrowed(s: Sensitivity, label: str, width: int | None) -> list[str]:
    for spread in (_SPREAD, _SPREAD[:1], ()):
        title, *lines = _of_candidate(s, label, spread)
        if width is None or all(len(line) <= width for line in lines):
            break
    return [title, *lines]


def _of_candidate(s: Sensitivity, label: str, spread: tuple[_Part, ...]) -> list[str]:
    formats = ", ".join(f"{gemm}: {fmt}" for gemm, fmt in s.candidates[label].items())
    base = ", the base" if label == s.base else ""
    layers = [layer for layer in s.layers if any(label in s.effects.get(Site(layer, gemm), {}) for gemm in GEMMS)]
    if not layers:
        return [f"{label}{base}: not measured"]
    shown = layers
    if len(layers) > _MOST_LAYERS:
        shown = sorted(layers, key=lambda layer: -_fprop(s, layer, label))[:_MOST_LAYERS]
    rows = [["layer", *_COLUMNS], *([layer, *_cells(s, layer, label, spread)] for layer in shown)]
    rows.append(["sum of all layers", *_totals(s, layers, label)])
    text = aligned(rows, numbers=True)
    more = [f"... and {len(layers) - len(shown)} layers that are less sensitive"] if len(shown) < len(layers) else []
    return [f"{label}{base} ({formats})", *text[:-1], *more, text[-1]]


def _fprop(s: Sensitivity, layer: str, label: str) -> float:
    effect = _effect(s, layer, "fprop", label).loss
    return 0.0 if effect is None else effect.mean


def _effect(s: Sensitivity, layer: str, gemm: str, label: str) -> Effect:
    return s.effects.get(Site(layer, gemm), {}).get(label, Effect())


def _loss(effect: Effect) -> Estimate | None:
    return effect.loss


def _noise(effect: Effect) -> Estimate | None:
    return effect.noise


def _bias(effect: Effect) -> Estimate | None:
    return effect.bias


_SPREAD: tuple[_Part, ...] = (_loss, _bias)  # what is shown with an interval
_PARTS: tuple[tuple[str, _Part, float], ...] = (
    ("fprop", _loss, 1000.0),
    ("dgrad", _noise, 100.0),
    ("dgrad", _bias, 100.0),
    ("wgrad", _noise, 100.0),
    ("wgrad", _bias, 100.0),
)


def _cells(s: Sensitivity, layer: str, label: str, spread: tuple[_Part, ...]) -> list[str]:
    cells = []
    for gemm, part, unit in _PARTS:
        value = part(_effect(s, layer, gemm, label))
        interval = f" ± {unit * value.half_width:.3f}" if value is not None and part in spread else ""
        cells.append("-" if value is None else f"{unit * value.mean:.3f}{interval}")
    return cells


def _totals(s: Sensitivity, layers: list[str], label: str) -> list[str]:
    cells = []
    for gemm, part, unit in _PARTS:
        values = [value for layer in layers if (value := part(_effect(s, layer, gemm, label))) is not None]
        cells.append(f"{unit * sum(value.mean for value in values):.3f}" if values else "-")
    return cells
