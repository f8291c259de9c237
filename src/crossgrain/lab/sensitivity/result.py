"""`Sensitivity`: what each format costs at each site, as numbers with intervals, and as a JSON file.

A *site* is one GEMM of one layer. Every effect is measured against high precision:

    loss    fprop: how much the loss rises, in nats per token, if this GEMM alone is in the format: to second order,
            which is what stays
    first   fprop: the first order, which may also be below 0, and which training removes in a few steps. The loss of
            these batches changes by the sum of both
    noise   dgrad and wgrad: the variance that the format adds to the gradient, as a share of the variance that the
            choice of the batch gives it, weighted as Adam weighs gradients
    bias    dgrad and wgrad: the square of what the format adds to the gradient on average, in the same unit

Noise averages out over steps, bias accumulates. Neither is a loss: they are not added to nats, unless a paired training
run has shown how many nats they are worth (`calibration`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...files.durable import whole_file
from ...gemm.operands import GEMMS
from ..intervals import Estimate

if TYPE_CHECKING:
    from ..search import Found

VERSION = 1


class Site(NamedTuple):
    """One GEMM of one layer."""

    layer: str
    gemm: str

    def __str__(self) -> str:
        return f"{self.layer} {self.gemm}"


@dataclass(frozen=True)
class Effect:
    """What one format does at one site. None for what is not measured for its GEMM."""

    loss: Estimate | None = None
    noise: Estimate | None = None
    bias: Estimate | None = None
    first: Estimate | None = None


@dataclass(frozen=True)
class LayerInfo:
    """Size and type of a layer, from which costs are computed.

    Attributes:
        module_type: "linear" or "grouped_linear".
        inputs: the size of K.
        outputs: the size of N.
        tokens: rows of its input in a batch; of a grouped layer, those of all groups.
        experts: number of weights of a grouped layer; 1 otherwise.
        group: the group of layers that it was measured with in dgrad, and that moves together in a search.
    """

    module_type: str
    inputs: int
    outputs: int
    tokens: int
    experts: int = 1
    group: str = ""


@dataclass
class Sensitivity:
    """The result of `sensitivity`.

    Attributes:
        base: the recipe that sites stay in if no candidate is chosen, as text.
        candidates: what each candidate means: by its label, the format of each GEMM. The base is among them.
        layers: sizes of the layers, by name, in the order of the model.
        effects: by site and label of a candidate.
        batches: number of batches that were measured.
        loss: mean loss of these batches in high precision, in nats per token.
        gradient_variance: the variance of a batch's gradient, as the optimizer weighs it: the unit of noise and bias.
        calibration: nats per unit of noise of "dgrad" and "wgrad", if paired training runs have shown it.
        left_out: layers of which something was not measured, and why.
        notes: what else has to be known about the numbers.
        fingerprint: tells measurements of different models, weights, data, optimizers, groups or seeds apart.
        included: layers that were measured although `convert` leaves them in high precision by default.
        skipped: layers that were left alone because ``skip`` names them.
        interrupted: the measurement was stopped early. What is there is valid.
    """

    base: str
    candidates: dict[str, dict[str, str]]
    layers: dict[str, LayerInfo] = field(default_factory=dict)
    effects: dict[Site, dict[str, Effect]] = field(default_factory=dict)
    batches: int = 0
    loss: float = math.nan
    gradient_variance: float = math.nan
    calibration: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fingerprint: str = ""
    included: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    interrupted: bool = False

    def sites(self) -> Iterator[Site]:
        """All sites with an effect, layer by layer."""
        for layer in self.layers:
            for gemm in GEMMS:
                if Site(layer, gemm) in self.effects:
                    yield Site(layer, gemm)

    def effect(self, layer: str, gemm: str, candidate: str) -> Effect:
        """The effect of a candidate at a site.

        Raises:
            KeyError: it was not measured.
        """
        return self.effects[Site(layer, gemm)][candidate]

    def only(self, labels: Iterable[str]) -> Sensitivity:
        """The same results with these candidates alone, and the base.

        Raises:
            KeyError: a candidate was not measured.
        """
        kept = {label: self.candidates[label] for label in (self.base, *labels)}
        effects = {
            site: {label: effect for label, effect in own.items() if label in kept}
            for site, own in self.effects.items()
        }
        return replace(self, candidates=kept, effects=effects)

    def search(self, **target: Any) -> Found:
        """Choose a candidate for each GEMM of each layer: ``s.search(saving=0.8)``. See `crossgrain.lab.search`.

        Args:
            **target: arguments of `crossgrain.lab.search`.
        """
        from ..search import search

        return search(self, **target)

    def __str__(self) -> str:
        from .text import table

        return table(self)

    # ---- files -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON. Infinite ends of intervals are None."""
        return {
            "version": VERSION,
            "base": self.base,
            "candidates": self.candidates,
            "batches": self.batches,
            "loss": _number(self.loss),
            "gradient_variance": _number(self.gradient_variance),
            "calibration": self.calibration,
            "left_out": self.left_out,
            "notes": self.notes,
            "fingerprint": self.fingerprint,
            "included": self.included,
            "skipped": self.skipped,
            "interrupted": self.interrupted,
            "layers": {name: vars(info) for name, info in self.layers.items()},
            "sites": [
                {
                    "layer": site.layer,
                    "gemm": site.gemm,
                    "effects": {label: _effect_dict(effect) for label, effect in self.effects[site].items()},
                }
                for site in self.sites()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sensitivity:
        """The result that `to_dict` wrote.

        Raises:
            ValueError: the data is of another version, or is not such a result.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != VERSION:
            raise ValueError(f"this is not a sensitivity of version {VERSION}: its version is {version!r}")
        try:
            return cls(
                base=data["base"],
                candidates=dict(data["candidates"]),
                layers={name: LayerInfo(**info) for name, info in data["layers"].items()},
                effects={
                    Site(site["layer"], site["gemm"]): {
                        label: _effect(effect) for label, effect in site["effects"].items()
                    }
                    for site in data["sites"]
                },
                batches=data["batches"],
                loss=_known(data["loss"]),
                gradient_variance=_known(data["gradient_variance"]),
                calibration=dict(data["calibration"]),
                left_out=dict(data["left_out"]),
                notes=list(data["notes"]),
                fingerprint=data["fingerprint"],
                included=list(data["included"]),
                skipped=list(data["skipped"]),
                interrupted=data["interrupted"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not a sensitivity: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a JSON file, which is whole or not there."""
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sensitivity:
        """Read a file that `save` wrote.

        Raises:
            ValueError: it is not such a file.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _effect_dict(effect: Effect) -> dict[str, Any]:
    return {
        name: [_number(value.mean), _number(value.low), _number(value.high), value.count]
        for name, value in vars(effect).items()
        if value is not None
    }


def _effect(data: Mapping[str, Any]) -> Effect:
    return Effect(**{name: _estimate(*values) for name, values in data.items()})


def _estimate(mean: float | None, low: float | None, high: float | None, count: int) -> Estimate:
    return Estimate(
        math.nan if mean is None else mean, -math.inf if low is None else low, math.inf if high is None else high, count
    )
