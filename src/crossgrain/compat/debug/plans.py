"""What the features say about a layer in one iteration: which operands they change, and which tensors they look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...planes import Direction
from .quantizers import Way
from .tensors import OPERANDS, RESULTS, gemm_of

Ask = Callable[..., Any]
"""Asks the features: ``ask("modify_tensor_enabled", tensor_name=..., gemm=...)`` is what they return."""


@dataclass(frozen=True)
class LayerPlan:
    """The plan of a layer.

    Attributes:
        layer: name of the layer.
        iteration: the iteration that it is for.
        ways: how each operand is made, by tensor and direction.
        inspected: the tensors that features look at.
        inspected_later: tensors and directions that features of the older kind look at, after they were quantized.
        modified: results of GEMMs that features change.
    """

    layer: str
    iteration: int
    ways: Mapping[str, Mapping[Direction, Way]]
    inspected: frozenset[str]
    inspected_later: frozenset[tuple[str, Direction]]
    modified: frozenset[str]

    @property
    def changed(self) -> list[str]:
        """The operands that are not made as the recipe says."""
        return [tensor for tensor, ways in self.ways.items() if set(ways.values()) != {"recipe"}]

    @property
    def numbers(self) -> Any:
        """All that decides about numbers, in which groups of a layer must agree; None if nothing is changed."""
        if not (self.changed or self.modified):
            return None
        return {tensor: dict(ways) for tensor, ways in self.ways.items()}, self.modified

    @property
    def is_idle(self) -> bool:
        """Whether the layer runs as without features."""
        return not (self.changed or self.inspected or self.inspected_later or self.modified)


def plan_of(layer: str, iteration: int, ask: Ask) -> tuple[LayerPlan, int | None]:
    """Ask all features about a layer.

    Returns:
        The plan, and, if it is idle, the next iteration that may have another one; None if there is none.
    """
    upcoming: list[int] = []

    def says(call: str, **about: Any) -> bool:
        answer = ask(call, **about)
        if isinstance(answer, tuple):
            now, later = answer
            upcoming.extend([] if later is None else [later])
            return bool(now)
        upcoming.append(iteration + 1)  # it did not say when it may say something else
        return bool(answer)

    ways: dict[str, dict[Direction, Way]] = {}
    for tensor in OPERANDS:
        ways[tensor] = {}
        for direction in Direction:
            gemm = gemm_of(tensor, direction)
            way: Way = "recipe" if says("fp8_gemm_enabled", gemm=gemm) else "high precision"
            modified = says("modify_tensor_enabled", tensor_name=tensor, gemm=gemm)
            ways[tensor][direction] = "feature" if modified else way
    plan = LayerPlan(
        layer,
        iteration,
        ways,
        frozenset(tensor for tensor in (*OPERANDS, *RESULTS) if says("inspect_tensor_enabled", tensor_name=tensor)),
        frozenset(
            (tensor, direction)
            for tensor in OPERANDS
            for direction in Direction
            if says("inspect_tensor_postquantize_enabled", tensor_name=tensor, gemm=gemm_of(tensor, direction))
        ),
        frozenset(
            tensor for tensor, gemm in RESULTS.items() if says("modify_tensor_enabled", tensor_name=tensor, gemm=gemm)
        ),
    )
    return plan, min(upcoming, default=None)
