"""What layers cost in the run that is planned: seconds of GEMMs, and bytes, by the figures of `crossgrain.planning`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from ...planning import LayerEstimate, device_of, layer_estimate
from ...planning.devices import Device
from ...recipe import GemmRecipe
from ..sensitivity.result import LayerInfo, Sensitivity

BYTES = ("saved", "gathered")  # kinds of bytes that can be limited


@dataclass(frozen=True)
class Cost:
    """Seconds, and bytes that layers save for backward and that are gathered in a step."""

    seconds: float = 0.0
    saved: int = 0
    gathered: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.saved + other.saved, self.gathered + other.gathered)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.seconds - other.seconds, self.saved - other.saved, self.gathered - other.gathered)


class Costs:
    """Costs of the layers of a sensitivity, at the sizes of the run that is planned.

    Args:
        s: the sensitivity.
        device: the GPU.
        tokens: rows of most layers; those of others in proportion. None for the rows that were measured.
        scale: what inputs and outputs of all layers are multiplied by.
        dtype: dtype of what is in high precision.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(self, s: Sensitivity, device: str | Device, tokens: int | None, scale: float, dtype: str) -> None:
        if tokens is not None and tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens}")
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"scale must be a number above 0, got {scale}")
        self.device = device_of(device)
        self.tokens, self.scale, self.dtype = tokens, scale, dtype
        self._layers = s.layers
        usual = Counter(info.tokens for info in s.layers.values() if info.experts == 1) or Counter(
            info.tokens for info in s.layers.values()
        )
        self._rows = 1.0 if tokens is None or not usual else tokens / usual.most_common(1)[0][0]

    def estimate(self, recipe: GemmRecipe, layer: str) -> LayerEstimate:
        """What a layer costs with a recipe.

        Raises:
            ValueError: the recipe cannot be used for the layer.
        """
        info: LayerInfo = self._layers[layer]
        return layer_estimate(
            recipe,
            layer,
            tokens=max(1, round(info.tokens * self._rows)),
            inputs=max(1, round(info.inputs * self.scale)),
            outputs=max(1, round(info.outputs * self.scale)),
            device=self.device,
            dtype=self.dtype,
            module_type=info.module_type,
            experts=info.experts,
        )

    def of_all(self, recipe: GemmRecipe) -> Cost:
        """The cost of all layers."""
        return sum((total(self.estimate(recipe, layer)) for layer in self._layers), Cost())

    def __str__(self) -> str:
        tokens = "the tokens that were measured" if self.tokens is None else f"{self.tokens:,} tokens"
        wider = "" if self.scale == 1 else f", as if it were {self.scale:g} times as wide"
        return f"{self.device.name}, {tokens}{wider}"


def total(estimate: LayerEstimate) -> Cost:
    """The sums of an estimate. FSDP gathers a weight once for each pass."""
    return Cost(
        sum(estimate.seconds.values()),
        estimate.saved_input + estimate.saved_weight,
        estimate.gathered.forward + estimate.gathered.backward,
    )
