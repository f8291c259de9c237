"""The knapsack is solved exactly."""

from __future__ import annotations

import itertools
import random

import pytest

from crossgrain.lab.search import knapsack
from crossgrain.lab.search.knapsack import Option, solve


def by_brute_force(classes: list[list[Option]], limits: list[int]) -> int | None:
    found = [
        sum(option.harm for option in chosen)
        for chosen in itertools.product(*classes)
        if all(sum(option.costs[k] for option in chosen) <= limit for k, limit in enumerate(limits))
    ]
    return min(found, default=None)


def random_problem(rng: random.Random, limits: int) -> tuple[list[list[Option]], list[int]]:
    large = rng.choice([2, 20, 10**6, 10**18])
    classes = [
        [
            Option(rng.randrange(-large, large), tuple(rng.randrange(-large // 4, large) for _ in range(limits)))
            for _ in range(rng.randrange(1, 4))
        ]
        for _ in range(rng.randrange(1, 7))
    ]
    ends = [
        (sum(min(o.costs[k] for o in own) for own in classes), sum(max(o.costs[k] for o in own) for own in classes))
        for k in range(limits)
    ]
    return classes, [rng.randrange(low - 2, high + 3) for low, high in ends]


@pytest.mark.parametrize("limits", [1, 2])
def test_no_choice_is_better(limits: int) -> None:
    rng = random.Random(limits)
    reached = 0
    for _ in range(600 if limits == 1 else 200):
        classes, bounds = random_problem(rng, limits)
        best, found = by_brute_force(classes, bounds), solve(classes, bounds)
        if best is None or found is None:
            assert best is None and found is None
            continue
        reached += 1
        chosen = [own[i] for own, i in zip(classes, found.options, strict=True)]
        assert found.proven and found.harm == best == sum(option.harm for option in chosen)
        assert all(sum(o.costs[k] for o in chosen) <= bound for k, bound in enumerate(bounds))
    assert reached > 100


def test_many_classes_are_few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of sites with a few different costs, as layers have: by the number of states that are looked at."""
    listed = []
    without_worse = knapsack._without_worse

    def counted(states: list) -> list:
        listed.append(len(states))
        return without_worse(states)

    monkeypatch.setattr(knapsack, "_without_worse", counted)
    rng = random.Random(0)
    sizes = [round(2**50 * (0.2 + rng.random())) for _ in range(5)]
    classes = []
    for i in range(672):
        cost, harm = sizes[i % 5], round(2**50 * rng.lognormvariate(0, 1))
        classes.append([Option(0, (cost,)), Option(harm, (cost // 2,)), Option(harm * 2, (cost // 3,))])
    total = sum(own[0].costs[0] for own in classes)
    for share in (0.9, 0.7, 0.5):
        found = solve(classes, [round(share * total)])
        assert found is not None and found.proven
    assert sum(listed) < 200_000


def test_a_list_that_grows_too_long_is_said_to_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "_WIDTHS", (1,))
    monkeypatch.setattr(knapsack, "_MOST", {1: 1})
    rng = random.Random(0)
    classes = [[Option(0, (50 + i,)), Option(rng.randrange(1000), (i,))] for i in range(12)]
    proven = []
    for limit in range(150, 500, 7):
        found = solve(classes, [limit])
        assert found is not None
        best = by_brute_force(classes, [limit])
        assert found.harm == best if found.proven else found.harm >= best  # type: ignore[operator]
        proven.append(found.proven)
    assert not all(proven)
