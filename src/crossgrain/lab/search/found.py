"""`Found`: the recipe that a search has found, with what it saves and what it is predicted to cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...recipe import GemmRecipe
from ..intervals import Estimate
from ..sensitivity.result import Site

VERSION = 1


class Tie(NamedTuple):
    """Two choices that the measurement cannot tell apart: the intervals of their effects overlap.

    Attributes:
        moved: sites that have left the base; the first of a group.
        label: the candidate that they have.
        effect: what the move adds.
        other: sites that could have moved instead.
        other_label: the candidate that they would have.
        other_effect: what that would add.
        unit: "nats", or "bias" for backward GEMMs that are not priced in nats.
    """

    moved: Site
    label: str
    effect: Estimate
    other: Site
    other_label: str
    other_effect: Estimate
    unit: str


@dataclass
class Found:
    """The result of `search`. Print it to see a table.

    Attributes:
        recipe: the recipe.
        chosen: the label of a candidate, or the base, for every site that was free to move.
        fixed: sites that a rule decides, and the rule.
        target: what was asked for, in words.
        saving: share of the time of GEMMs that is saved, of what can be saved: 1 if all free sites have their fastest
            candidate.
        seconds: time of the GEMMs of all measured layers, at published rates.
        base_seconds: the same for the base.
        bytes: bytes of all measured layers: "saved" for backward, and "gathered" as planes of weights in a step.
        base_bytes: the same for the base.
        predicted: gap to high precision in nats per token: the sum of the effects of all sites, whether they have moved
            or not. The interval is that of independent effects.
        base_predicted: the same for the base.
        noise: sums of noise of "dgrad" and "wgrad", in shares of a batch's variance.
        bias: sums of squared bias, in the same unit.
        ties: choices that the measurement cannot tell apart, at most one for each move.
        notes: what is not priced, what was left out, and why.
        proven: no other choice reaches the target with less predicted harm.
    """

    recipe: GemmRecipe
    chosen: dict[Site, str]
    fixed: dict[Site, str]
    target: str
    saving: float
    seconds: float
    base_seconds: float
    bytes: dict[str, int]
    base_bytes: dict[str, int]
    predicted: Estimate
    base_predicted: Estimate
    noise: dict[str, Estimate] = field(default_factory=dict)
    bias: dict[str, Estimate] = field(default_factory=dict)
    ties: list[Tie] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    proven: bool = True

    def __str__(self) -> str:
        from .text import table

        return table(self)

    # ---- plain data ------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON. Infinite ends of intervals are None."""
        return {
            "version": VERSION,
            "recipe": str(self.recipe),
            "chosen": [[*site, label] for site, label in self.chosen.items()],
            "fixed": [[*site, rule] for site, rule in self.fixed.items()],
            "ties": [
                [
                    *tie.moved,
                    tie.label,
                    _plain(tie.effect),
                    *tie.other,
                    tie.other_label,
                    _plain(tie.other_effect),
                    tie.unit,
                ]
                for tie in self.ties
            ],
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            **{name: _plain(getattr(self, name)) for name in _ESTIMATES},
            **{name: {gemm: _plain(own) for gemm, own in getattr(self, name).items()} for name in _BY_GEMM},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Found:
        """The result that `to_dict` wrote.

        Raises:
            ValueError: the data is of another version, or is not such a result.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != VERSION:
            raise ValueError(f"this is not a found recipe of version {VERSION}: its version is {version!r}")
        try:
            plain: dict[str, Any] = {name: data[name] for name in _AS_THEY_ARE}
            plain.update({name: _estimate(data[name]) for name in _ESTIMATES})
            plain.update({name: {gemm: _estimate(own) for gemm, own in data[name].items()} for name in _BY_GEMM})
            return cls(
                recipe=GemmRecipe.load(data["recipe"]),
                chosen={Site(layer, gemm): label for layer, gemm, label in data["chosen"]},
                fixed={Site(layer, gemm): rule for layer, gemm, rule in data["fixed"]},
                ties=[
                    Tie(Site(*tie[:2]), tie[2], _estimate(tie[3]), Site(*tie[4:6]), tie[6], _estimate(tie[7]), tie[8])
                    for tie in data["ties"]
                ],
                **plain,
            )
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"this is not a found recipe: {error!r}") from error


_AS_THEY_ARE = ("target", "saving", "seconds", "base_seconds", "bytes", "base_bytes", "notes", "proven")
_ESTIMATES = ("predicted", "base_predicted")
_BY_GEMM = ("noise", "bias")


def _plain(value: Estimate) -> list[float | None]:
    ends = [end if math.isfinite(end) else None for end in (value.low, value.high)]
    return [value.mean, *ends, value.count]


def _estimate(values: list[Any]) -> Estimate:
    mean, low, high, count = values
    return Estimate(mean, -math.inf if low is None else low, math.inf if high is None else high, count)
