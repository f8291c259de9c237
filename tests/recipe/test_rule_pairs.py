"""Rules of a recipe are right if there is something below them that they pair with."""

import random

import pytest

from crossgrain.recipe import GemmRecipe, rule_pairs
from crossgrain.recipe.layer_formats import GEMMS, Settings, make_layer_formats, make_settings
from crossgrain.recipe.rule_pairs import unpaired_rule

DEFAULT = make_settings({"all": "mxfp8"})
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "hp")
OPERANDS = [f"{gemm}.{tensor}" for gemm, operands in GEMMS.items() for tensor in operands]


def pairs(*stages: Settings) -> bool:
    """By the check of a whole layer, which compares formats one by one."""
    try:
        make_layer_formats(tuple(("", stage) for stage in (DEFAULT, *stages))).check_pairs("")
    except ValueError:
        return False
    return True


def first_wrong(rules: list[Settings]) -> int | None:
    """What `unpaired_rule` says, found by trying everything that its docstring names."""
    for i, rule in enumerate(rules):
        if not (pairs(rule) or any(pairs(other, rule) for other in rules[:i]) or pairs(*rules[:i], rule)):
            return i
    return None


def test_few_kinds_decide_what_all_formats_would() -> None:
    rng = random.Random(0)
    keys = ["all", *GEMMS, *OPERANDS]
    found = []
    for _ in range(300):
        rules = [
            make_settings({key: rng.choice(FORMATS) for key in rng.sample(keys, rng.choice([1, 1, 2, 3]))})
            for _ in range(rng.randrange(1, 6))
        ]
        found.append(unpaired_rule(make_layer_formats((("", DEFAULT),)), rules, tuple(GEMMS)))
        assert found[-1] == first_wrong(rules)
    assert set(found) >= {None, 0, 1, 2, 3}  # all of these happen


def test_a_rule_may_need_several_before_it() -> None:
    rules = [
        "a: fprop.input: nvfp4, fprop.weight: nvfp4",
        "b: dgrad: nvfp4",
        "c: fprop.input: nvfp4, dgrad.weight: nvfp4",
    ]
    GemmRecipe("mxfp8", "mxfp8", "mxfp8", rules=rules)
    with pytest.raises(ValueError, match=r"^rule 2 \(c\): fprop multiplies input rowwise \(nvfp4\)"):
        GemmRecipe("mxfp8", "mxfp8", "mxfp8", rules=[rules[0], rules[2]])


def test_only_gemms_that_are_not_decoded_must_pair() -> None:
    rules = ["a: dgrad.weight: nvfp4"]
    GemmRecipe("mxfp8", "mxfp8", "mxfp8", rules=rules, backward_override="dequantized")
    GemmRecipe("mxfp8", "mxfp8", "mxfp8", rules=["a: fprop.weight: nvfp4"], allow_mixed=True)
    with pytest.raises(ValueError, match="rule 1"):
        GemmRecipe("mxfp8", "mxfp8", "mxfp8", rules=["a: fprop.weight: nvfp4"], backward_override="dequantized")


def test_the_number_of_checks_grows_with_the_number_of_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that are right only together with an earlier one are not checked with each of those before them."""
    checks = []
    all_pair = rule_pairs.all_pair

    def counted(*stages: object) -> bool:
        checks.append(stages)
        return all_pair(*stages)  # type: ignore[arg-type]

    monkeypatch.setattr(rule_pairs, "all_pair", counted)
    first = [f"l.{i}: dgrad: fp8(eps={i + 1}e-9)" for i in range(500)]
    last = [f"m.{i}: fprop.input: nvfp4, wgrad: fp8(eps={i + 1}e-9)" for i in range(500)]
    GemmRecipe("mxfp8", "mxfp8", "mxfp8", rules=[*first, "*: fprop: nvfp4", *last])
    assert len(checks) <= 3 * 1001
