"""Patterns for some names and not for others."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossgrain.recipe.cover import patterns_for
from crossgrain.recipe.rules import Glob, parse_matcher

PARTS = st.sampled_from(["a", "b_c", "d_c", "1", "12", "7", "21", "x*", "[y"])
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), max_size=25, unique=True)


def matched(patterns: list[str], names: list[str]) -> list[str]:
    return [name for name in names if Glob(tuple(patterns)).matches(name, "linear")]


@given(NAMES, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=300)
def test_exactly_the_wanted_names_are_matched(names: list[str], rng: random.Random) -> None:
    wanted = [name for name in names if rng.random() < 0.5]
    for naming in (True, False):
        patterns = patterns_for(wanted, [name for name in names if name not in wanted], naming=naming)
        assert matched(patterns, names) == wanted
        assert len(patterns) <= len(wanted)
        assert not naming or all(pattern.rpartition(".")[2] != "*" for pattern in patterns)
        if patterns:
            assert parse_matcher("|".join(patterns)) == Glob(tuple(patterns))  # they can be written


def blocks(*numbers: int) -> list[str]:
    return [f"model.layers.{i}.{part}" for i in numbers for part in ("attn.q_proj", "mlp.up_proj", "mlp.fc")]


@pytest.mark.parametrize(
    ("wanted", "others", "expected"),
    [
        (blocks(*range(24))[::3], blocks(*range(24)), ["*.q_proj"]),
        (["lm_head"], blocks(0), ["lm_head"]),  # a single name in full
        ([name for name in blocks(*range(30)) if name.endswith("_proj")], blocks(*range(30))[2::3], ["*_proj"]),
        (blocks(3)[:2], [*blocks(3)[2:], *blocks(13)], ["model.layers.3.*_proj"]),
        (blocks(3), [], ["*_proj", "model.layers.3.mlp.fc"]),
        (
            [name for name in blocks(*range(7, 22)) if name.endswith(".fc")],
            blocks(*range(7), *range(22, 30)),
            ["model.layers.[7-9].*.fc", "model.layers.1[0-9].*.fc", "model.layers.2[01].*.fc"],
        ),
        (["layers.1.fc"], ["layers.11.fc", "layers.1.fc.x", "x.layers.1.fc"], ["layers.1.fc"]),
    ],
)
def test_patterns_are_short(wanted: list[str], others: list[str], expected: list[str]) -> None:
    others = [name for name in others if name not in wanted]
    assert patterns_for(wanted, others) == expected
    assert matched(expected, [*wanted, *others]) == wanted


def test_whole_blocks_are_shorter_if_their_layers_need_not_be_named() -> None:
    names, others = blocks(1, 2), blocks(0, 3, 12)
    assert patterns_for(names, others) == ["model.layers.[12].*_proj", "model.layers.[12].*.fc"]
    assert patterns_for(names, others, naming=False) == ["model.layers.[12].*"]


def test_names_that_cannot_be_written_get_a_joker() -> None:
    assert patterns_for(["a b"], ["a.b"]) == ["a?b"]
