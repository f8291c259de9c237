"""`solve`: the multiple-choice knapsack, exactly. One option of each class, least harm, and limits on sums of costs.

All numbers are integers, so that sums are exact. The method is branch and bound in the form of a dynamic program:

1. Prices for the limited costs (Lagrange multipliers) give a lower bound. With them, each option has a *slack*: by how
   much it is worse than the best option of its class. The harm of a solution is at least the bound plus its slacks.
2. One solution is known from rounding. Only options whose slack is below its difference to the bound can be in a better
   one. They are few, because the difference is at most about one option.
3. All combinations of these options whose slacks stay below the difference are listed, class by class; those that cost
   and harm at least as much as another one are dropped. Each is a solution if it keeps the limits, and better ones make
   the difference smaller. Lists that are cut off find good solutions first. The last list is whole.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

_FINE = 2**20  # steps of prices that are searched for
_WIDTHS = (16, 128, 1024)  # of lists that are cut off
_MOST = {1: 1_000_000, 2: 4096}  # states of the list that should be whole, by number of limits


class Option(NamedTuple):
    """One choice of a class.

    Attributes:
        harm: what is minimized.
        costs: what is limited, one number for each limit.
    """

    harm: int
    costs: tuple[int, ...]


class Solution(NamedTuple):
    """The result of `solve`.

    Attributes:
        options: position of the chosen option of each class.
        harm: the sum of their harms.
        proven: no solution is better. False only if the list of combinations grew too long, and was cut off.
    """

    options: list[int]
    harm: int
    proven: bool


class _Change(NamedTuple):
    """Another option than the one that the prices choose."""

    slack: int
    harm: int  # difference of harms, in units
    costs: tuple[int, ...]  # differences of costs
    position: int


class _Class(NamedTuple):
    """A class, and its changes that are worth a look."""

    number: int
    changes: list[_Change]


_Link = Any  # what was changed before, the class and the option; None if nothing was

# By how much each cost is over its limit, by how much the harm is above the bound (in units), and what was changed.
_State = tuple[tuple[int, ...], int, _Link]


def solve(classes: Sequence[Sequence[Option]], limits: Sequence[int]) -> Solution | None:
    """Choose one option of each class so that no sum of costs is above its limit, and the sum of harms is the least.

    Args:
        classes: the options of each class; at least one for each.
        limits: one for each cost of an option; one or two.

    Returns:
        The solution; None if there is none.
    """
    prices, unit = _prices(classes, limits)
    best = _Best(classes, limits, prices, unit)
    for width in (*_WIDTHS, _MOST[len(limits)]):
        if best.difference is not None and best.difference <= 0:
            return best.solution(proven=True)
        if _list(best, width):
            return best.solution(proven=True)
    return best.solution(proven=False)


class _Best:
    """What the prices choose, the lower bound that follows from it, and the best solution so far."""

    def __init__(
        self, classes: Sequence[Sequence[Option]], limits: Sequence[int], prices: Sequence[int], unit: int
    ) -> None:
        self.classes, self.prices, self.unit = classes, prices, unit
        self.start = [
            min(range(len(options)), key=lambda i: (self.price(options[i]), options[i].costs)) for options in classes
        ]
        first = [options[i] for options, i in zip(classes, self.start, strict=True)]
        self.bound = sum(map(self.price, first)) - sum(map(int.__mul__, prices, limits))
        over = tuple(sum(option.costs[k] for option in first) - limit for k, limit in enumerate(limits))
        self.begin: _State = (over, unit * sum(option.harm for option in first) - self.bound, None)
        self.difference: int | None = None  # of the best solution to the bound
        self.chosen: _Link = None
        self.offer(self.begin)

    def price(self, option: Option) -> int:
        """The harm of an option, in units, with its costs paid for."""
        return self.unit * option.harm + sum(map(int.__mul__, self.prices, option.costs))

    def offer(self, state: _State) -> None:
        """Remember a state if it keeps the limits and is the best."""
        over, harm, chosen = state
        if (self.difference is None or harm < self.difference) and max(over) <= 0:
            self.difference, self.chosen = harm, chosen

    def core(self) -> list[_Class]:
        """The classes with changes that may be in a better solution, those with small slacks last."""
        found = []
        for number, options in enumerate(self.classes):
            first = options[self.start[number]]
            least = self.price(first)
            changes = []
            for position, option in enumerate(options):
                slack = self.price(option) - least
                if position != self.start[number] and (self.difference is None or slack < self.difference):
                    costs = tuple(map(int.__sub__, option.costs, first.costs))
                    changes.append(_Change(slack, self.unit * (option.harm - first.harm), costs, position))
            if changes:
                found.append(_Class(number, changes))
        return sorted(found, key=lambda each: min(each.changes).slack, reverse=True)

    def solution(self, proven: bool) -> Solution | None:
        """The best solution; None if there is none."""
        if self.difference is None:
            return None
        options, link = list(self.start), self.chosen
        while link is not None:
            link, number, position = link
            options[number] = position
        return Solution(options, (self.difference + self.bound) // self.unit, proven)


def _list(best: _Best, width: int) -> bool:
    """List combinations of changes, at most ``width`` after each class. Returns whether none was left out."""
    core = best.core()
    limits = len(best.prices)
    least, most = _reach(core, limits, min), _reach(core, limits, max)
    states, whole = [best.begin], True
    for at, each in enumerate(core, 1):
        before, states = states, list(states)
        for change in each.changes:
            if best.difference is not None and change.slack >= best.difference:
                continue
            for over, harm, chosen in before:
                state = (
                    (over[0] + change.costs[0],) if limits == 1 else tuple(map(int.__add__, over, change.costs)),
                    harm + change.harm,
                    (chosen, each.number, change.position),
                )
                best.offer(state)
                states.append(state)
        states = _without_worse(_that_may_win(best, states, least[at], most[at]))
        if len(states) > width:
            states, whole = sorted(states, key=lambda state: _penalty(best, state, most[at]))[:width], False
    return whole


def _reach(core: Sequence[_Class], limits: int, choose: Callable[[list[int]], int]) -> list[tuple[int, ...]]:
    """For each place in the list of classes, by how much all classes from there on can change each cost at most."""
    ends = [
        tuple(choose([0, *(change.costs[k] for change in each.changes)]) for k in range(limits))
        for each in reversed(core)
    ]
    return list(accumulate(ends, lambda a, b: tuple(map(int.__add__, a, b)), initial=(0,) * limits))[::-1]


def _penalty(best: _Best, state: _State, most: tuple[int, ...]) -> int:
    """By how much the harm of a state, completed in any way that keeps the limits, is at least above the bound."""
    return state[1] + sum(
        price * max(over, -more) for price, over, more in zip(best.prices, state[0], most, strict=True)
    )


def _that_may_win(best: _Best, states: list[_State], least: tuple[int, ...], most: tuple[int, ...]) -> list[_State]:
    """The states that can be completed within the limits, and better than the best solution."""
    bar = best.difference
    if len(least) == 1:
        (price,), (less,), (more,) = best.prices, least, most
        return [
            state
            for state in states
            if (over := state[0][0]) + less <= 0 and (bar is None or state[1] + price * max(over, -more) < bar)
        ]
    return [
        state
        for state in states
        if max(map(int.__add__, state[0], least)) <= 0 and (bar is None or _penalty(best, state, most) < bar)
    ]


def _without_worse(states: list[_State]) -> list[_State]:
    """Leave out states that cost and harm at least as much as another one, for one limit or two."""
    kept: list[_State] = []
    ends: list[int] = []  # last costs of kept states, rising, and the least harm up to each of them
    harms: list[int] = []
    for state in sorted(states, key=lambda state: (state[0], state[1])):
        costs, harm, _ = state
        last = costs[-1] if len(costs) > 1 else 0  # the first costs are sorted
        at = bisect_right(ends, last)
        if at and harms[at - 1] <= harm:
            continue
        kept.append(state)
        end = at
        while end < len(ends) and harms[end] >= harm:
            end += 1
        start = at - 1 if at and ends[at - 1] == last else at
        ends[start:end], harms[start:end] = [last], [harm]
    return kept


# ---- prices ----------------------------------------------------------------------------------------


def _prices(classes: Sequence[Sequence[Option]], limits: Sequence[int]) -> tuple[list[int], int]:
    """Prices of the costs with the highest lower bound, or nearly so: whole numbers, and by what to divide them."""
    if len(limits) == 1:
        price = _exact_price(classes, limits[0])
        return [price.numerator], price.denominator

    low, high = 0, _FINE * math.ceil(_highest_price(classes))
    found = _with_first_price(classes, limits, high)
    while high - low > max(1, high // _FINE):  # the bound is a concave function of the price: go where it rises
        middle = (low + high) // 2
        prices, unit, over = _with_first_price(classes, limits, middle)
        if over:
            low = middle
        else:
            high, found = middle, (prices, unit, over)
    return found[0], found[1]


def _with_first_price(
    classes: Sequence[Sequence[Option]], limits: Sequence[int], price: int
) -> tuple[list[int], int, bool]:
    """Prices and unit if the first price is given, and whether the best options then exceed the first limit."""
    paid = [
        [Option(_FINE * option.harm + price * option.costs[0], option.costs[1:]) for option in options]
        for options in classes
    ]
    others, unit = _prices(paid, limits[1:])
    cost = sum(
        min(
            (unit * new.harm + sum(map(int.__mul__, others, new.costs)), old.costs[0])
            for new, old in zip(*both, strict=True)
        )[1]
        for both in zip(paid, classes, strict=True)
    )
    return [price * unit, *others], _FINE * unit, cost > limits[0]


def _exact_price(classes: Sequence[Sequence[Option]], limit: int) -> Fraction:
    """The price of one cost at which the options that are then the best just keep the limit."""
    steps: list[tuple[Fraction, int]] = []  # the price from which on a cheaper option is better, and what it saves
    cost = 0
    for options in classes:
        hull = _hull(options)
        cost += hull[0].costs[0]
        for first, second in pairwise(hull):
            saved = first.costs[0] - second.costs[0]
            steps.append((Fraction(second.harm - first.harm, saved), saved))
    price = Fraction(0)
    for at, saved in sorted(steps):
        if cost <= limit:
            break
        price = at
        cost -= saved
    return price


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options that are the best ones at some price, from the least harm to the least cost."""
    hull: list[Option] = []
    for option in sorted(options):
        if hull and option.costs[0] >= hull[-1].costs[0]:
            continue
        while len(hull) > 1 and _bends_up(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _bends_up(first: Option, second: Option, third: Option) -> bool:
    """Whether the second option is on or above the line from the first to the third."""
    early = (second.harm - first.harm) * (second.costs[0] - third.costs[0])
    late = (third.harm - second.harm) * (first.costs[0] - second.costs[0])
    return early >= late


def _highest_price(classes: Sequence[Sequence[Option]]) -> Fraction:
    """A price of the first cost above which no choice changes."""
    harms = [max(options).harm - min(options).harm for options in classes]
    gaps = [
        abs(first.costs[0] - second.costs[0])
        for options in classes
        for first, second in combinations(options, 2)
        if first.costs[0] != second.costs[0]
    ]
    return Fraction(max(harms, default=0) + 1, min(gaps, default=1))
