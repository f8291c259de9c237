"""`ties_of`: which choices the measurement cannot tell apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..intervals import Estimate
from .costs import Cost
from .effects import difference, gemms_without_price
from .found import Tie
from .problem import Choice, Move, Problem


class _Change(NamedTuple):
    """A change of one move: from a choice to another one."""

    move: Move
    choice: Choice
    cost: Cost
    effect: Estimate
    unit: str


def ties_of(problem: Problem, chosen: Sequence[int], keeps_target: Callable[[Cost], bool]) -> list[Tie]:
    """For each site that moved, the one most like it that did not, if their effects cannot be told apart.

    Only exchanges with which the target is still reached count.

    Args:
        problem: the problem.
        chosen: the number of each move's choice.
        keeps_target: whether the target is still reached if the cost changes by so much.
    """
    unpriced = gemms_without_price(problem.s)

    def change(move: Move, start: Choice, end: Choice) -> _Change:
        unit = "bias" if move.gemm in unpriced else "nats"
        before, after = (start.bias, end.bias) if unit == "bias" else (start.nats, end.nats)
        return _Change(move, end, end.cost - start.cost, difference(after, before), unit)

    made = [change(move, move.choices[0], move.choices[i]) for move, i in zip(problem.moves, chosen, strict=True) if i]
    instead = [
        change(move, move.choices[i], choice)
        for move, i in zip(problem.moves, chosen, strict=True)
        for number, choice in enumerate(move.choices)
        if number not in (0, i)
    ]
    found = []
    for one in made:
        like = [
            other
            for other in instead
            if other.unit == one.unit
            and other.move is not one.move
            and one.effect.overlaps(other.effect)
            and keeps_target(other.cost - one.cost)
        ]
        if like:
            other = min(like, key=lambda other: abs(other.effect.mean - one.effect.mean))
            found.append(
                Tie(
                    one.move.sites[0],
                    one.choice.label,
                    one.effect,
                    other.move.sites[0],
                    other.choice.label,
                    other.effect,
                    one.unit,
                )
            )
    return found
