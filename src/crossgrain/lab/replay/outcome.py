"""`Outcome`: what came of one run of a step; and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MEASURES = ("loss", "gradient norm", "gradient", "loss after the update", "nonfinite")

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What came of one run.

    Attributes:
        loss: the loss.
        gradient_norm: the norm of the gradients of all parameters.
        distance: the norm of their difference to the gradients in high precision; None if that was not measured.
        cosine: the cosine of the angle between both; None as well.
        loss_after: the loss of the same batch after the update, in high precision; None without an optimizer.
        nonfinite: how many numbers of the loss and the gradients are NaN or infinite.
        error: why the run ended early, if layers refuse NaNs and infinities.
    """

    loss: float
    gradient_norm: float
    distance: float | None = None
    cosine: float | None = None
    loss_after: float | None = None
    nonfinite: int = 0
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON. What is NaN or infinite is None."""
        return {name: plain(value) for name, value in vars(self).items()}


def plain(value: Any) -> Any:
    """A number for JSON: None if it is NaN or infinite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percent(share: float) -> str:
    """A share in words."""
    if not math.isfinite(share):
        return "NaN or infinite"
    whole = 100 * share
    return f"{whole:.0f} %" if abs(whole) >= 0.95 or whole == 0 else f"{whole:.1f} %"


def norm(gradients: Gradients) -> float:
    """The norm of all gradients."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))


def count_nonfinite(gradients: Gradients) -> int:
    """How many numbers of all gradients are NaN or infinite."""
    return sum(int((~each.isfinite()).sum()) for each in gradients.values())


def distances(one: Gradients, other: Gradients) -> dict[str, float]:
    """The norm of the difference of two gradients, by parameter. One that is missing counts as zero."""
    found = {}
    for name in {**one, **other}:
        a, b = one.get(name), other.get(name)
        missing = b if a is None else a if b is None else None
        found[name] = float(torch.dist(a.double(), b.double()) if missing is None else missing.double().norm())  # type: ignore[union-attr]
    return found


def cosine(one: Gradients, other: Gradients) -> float | None:
    """The cosine of the angle between two gradients; None if one of them is zero or not finite."""
    both = sum(float((each.double() * other[name].double()).sum()) for name, each in one.items() if name in other)
    norms = norm(one) * norm(other)
    return both / norms if norms > 0 and math.isfinite(norms) else None


def difference(measure: str, outcome: Outcome, high: Outcome) -> float:
    """How far a run is from high precision. Infinite if it is not finite where high precision is.

    Args:
        measure: one of `MEASURES`. "gradient" is the squared distance: the parts of operands that have nothing to do
            with each other then add up.
        outcome: the run.
        high: the run in high precision.
    """
    if measure == "nonfinite":
        return float(outcome.nonfinite)
    pair = {
        "loss": (outcome.loss, high.loss),
        "gradient norm": (outcome.gradient_norm, high.gradient_norm),
        "gradient": (None if outcome.distance is None else outcome.distance**2, 0.0),
        "loss after the update": (outcome.loss_after, high.loss_after),
    }[measure]
    if pair[0] is None or pair[1] is None:
        return math.inf
    apart = abs(pair[0] - pair[1])
    return math.inf if math.isnan(apart) else apart


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaNs too."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
