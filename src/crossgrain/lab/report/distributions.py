"""Distributions of tensors for a report: counts by powers of two, and numbers beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .numbers import short


@dataclass(frozen=True)
class Distribution:
    """How a tensor is distributed in one direction.

    Attributes:
        layer: name of the layer.
        tensor: "input", "weight" or "grad_output".
        direction: "rowwise" or "columnwise".
        counted: what the histogram counts, such as "blocks by the exponent of their scale".
        histogram: counts by exponent of two.
        statistics: numbers and words to show beside it, by name.
    """

    layer: str
    tensor: str
    direction: str
    counted: str
    histogram: Mapping[int, int]
    statistics: Mapping[str, float | str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Distribution | Mapping[str, Any]) -> Distribution:
        """A distribution, or a mapping with its fields.

        Raises:
            ValueError: the mapping lacks a field, or has one more.
        """
        if isinstance(value, Distribution):
            return value
        try:
            found = cls(**value)
            return cls(**{**vars(found), "histogram": {int(at): int(n) for at, n in found.histogram.items()}})
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is not a distribution: {error}") from error

    def to_data(self, layers: Mapping[str, int]) -> dict[str, Any]:
        """The distribution as the page reads it."""
        first = min(self.histogram, default=0)
        counts = [self.histogram.get(at, 0) for at in range(first, max(self.histogram, default=-1) + 1)]
        statistics = {
            name: value if isinstance(value, str) else short(value) for name, value in self.statistics.items()
        }
        return {
            "layer": layers[self.layer],
            "tensor": self.tensor,
            "direction": self.direction,
            "counted": self.counted,
            "first": first,
            "counts": counts,
            "statistics": statistics,
        }
