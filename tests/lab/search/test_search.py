"""A search finds the best choice for its target, keeps rules, and says what it left out."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from crossgrain.gemm.operands import GEMMS
from crossgrain.lab import Found, frontier, search
from crossgrain.lab.search.costs import Cost, Costs
from crossgrain.lab.search.effects import STEPS_OF_BIAS
from crossgrain.lab.sensitivity import Sensitivity
from crossgrain.lab.sensitivity.result import Effect, Site
from crossgrain.planning import gemm_seconds, layer_estimate
from crossgrain.recipe import GemmRecipe, RecipeSyntaxError

from .made import BASE, CANDIDATES, NEAREST, SR, estimate, loss, noise, random_sensitivity, sensitivity

BACKWARD = ("dgrad", "wgrad")


def seconds_of(s: Sensitivity, recipe: Any, device: str = "b200") -> float:
    """Seconds of all GEMMs of all layers, added up by hand."""
    return sum(
        sum(gemm_seconds(recipe, name, tokens=i.tokens, inputs=i.inputs, outputs=i.outputs, device=device).values())
        for name, i in s.layers.items()
    )


def formats(s: Sensitivity, found: Found, layer: str, gemm: str) -> str:
    chosen = found.recipe.layer_formats(layer, s.layers[layer].module_type)
    return " x ".join(str(chosen.format(gemm, tensor).value) for tensor in GEMMS[gemm])


# ---- the best choice -------------------------------------------------------------------------------


class Brute:
    """All choices of a small sensitivity. Nats, rank and seconds are added up without the code of the search."""

    def __init__(self, s: Sensitivity) -> None:
        self.s = s
        self.sites = [Site(layer, gemm) for layer in s.layers for gemm in GEMMS]
        self.options = [self.of_site(site) for site in self.sites]
        fastest = [min(option[3] for option in own) for own in self.options]
        self.possible = math.fsum(own[0][3] for own in self.options) - math.fsum(fastest)

    def of_site(self, site: Site) -> list[tuple[str, float, float, float]]:
        """Label, nats, rank and seconds; of backward formats that take equally long, the one with the least bias."""
        info, found = self.s.layers[site.layer], []
        for label, texts in self.s.candidates.items():
            effect = self.s.effects[site][label]
            recipe = GemmRecipe(**{**CANDIDATES[BASE], site.gemm: texts[site.gemm]})
            seconds = gemm_seconds(recipe, tokens=info.tokens, inputs=info.inputs, outputs=info.outputs)[site.gemm]
            if site.gemm == "fprop":
                assert effect.loss is not None
                found.append((label, effect.loss.mean, 0.0, seconds, 0.0))
            else:
                assert effect.noise is not None and effect.bias is not None
                nats = self.s.calibration.get(site.gemm, 0.0) * effect.noise.mean
                rank = effect.noise.mean + STEPS_OF_BIAS * max(0.0, effect.bias.mean)
                found.append((label, nats, rank, seconds, effect.bias.mean))
        kept = [
            option
            for i, option in enumerate(found)
            if i == 0
            or site.gemm == "fprop"
            or option[4] == min(other[4] for other in found[1:] if other[3] == option[3])
        ]
        return [option[:4] for option in kept]

    def all(self) -> list[tuple[float, float, float]]:
        """Nats, rank and seconds of every choice, sums rounded to what they are exact to."""
        return [
            tuple(round(math.fsum(option[k] for option in chosen), 15) for k in (1, 2, 3))  # type: ignore[misc]
            for chosen in itertools.product(*self.options)
        ]


@pytest.mark.parametrize("calibration", [{}, {"dgrad": 0.05, "wgrad": 0.3}])
def test_no_choice_reaches_the_target_with_less_harm(calibration: dict[str, float]) -> None:
    rng = random.Random(len(calibration))
    for _ in range(4):
        s = random_sensitivity(rng, 2, [SR, NEAREST])
        s.calibration = calibration
        brute = Brute(s)
        choices, base = brute.all(), seconds_of(s, BASE)
        for share in (0, 0.3, 0.62, 0.9, 1):
            reaching = [own for own in choices if base - own[2] >= share * brute.possible - 1e-12]
            nats, rank, _ = min(reaching)
            found = search(s, saving=share)
            assert found.proven and found.saving >= share - 1e-9
            assert found.predicted.mean == pytest.approx(nats, abs=1e-12)
            ranks = sum(found.noise[gemm].mean for gemm in BACKWARD) + STEPS_OF_BIAS * sum(
                max(0.0, s.effects[site][label].bias.mean)  # type: ignore[union-attr]
                for site, label in found.chosen.items()
                if site.gemm in BACKWARD
            )
            assert ranks == pytest.approx(rank, abs=1e-12)
            assert found.seconds == pytest.approx(seconds_of(s, found.recipe), rel=1e-12)
        for gap in (min(choices)[0], 0.0, 1e-3, 1.0):
            if gap < min(choices)[0] - 1e-12:
                continue
            nats, _, seconds = min((own for own in choices if own[0] <= gap + 1e-15), key=lambda own: own[2:] + own)
            found = search(s, max_gap=gap + 1e-15)
            assert found.predicted.mean <= gap + 1e-12
            assert found.seconds == pytest.approx(seconds, rel=1e-12)


def test_backward_moves_first_and_then_the_layers_that_need_forward_least() -> None:
    s = sensitivity({"a": 0.001, "b": 0.004, "c": 0.002, "d": 0.03})
    found = search(s, saving=2 / 3)  # dgrad and wgrad of equal layers are two thirds
    assert {site.gemm for site, label in found.chosen.items() if label != BASE} == set(BACKWARD)
    assert found.predicted.mean == pytest.approx(0.0037) == found.base_predicted.mean
    found = search(s, saving=10 / 12)
    assert [site.layer for site, label in found.chosen.items() if label == SR and site.gemm == "fprop"] == ["a", "c"]
    assert found.predicted.mean == pytest.approx(0.003 + 0.0034)
    assert str(found.recipe) == (
        "fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8; a|b|c|d: dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr); a|c: fprop: nvfp4"
    )


def test_backward_formats_are_chosen_by_bias_also_if_noise_is_priced() -> None:
    """Rounding to nearest has less noise, but its bias accumulates."""
    for calibration in ({}, {"dgrad": 1.0, "wgrad": 1.0}):
        found = search(sensitivity({"a": 0.001}, calibration=calibration), saving=1)
        assert {found.chosen[Site("a", gemm)] for gemm in BACKWARD} == {SR}


def test_calibrated_noise_is_added_to_nats() -> None:
    s = sensitivity({"a": 0.001, "b": 0.002}, backward=0.01, calibration={"dgrad": 0.5})
    found = search(s, saving=1)
    assert found.predicted.mean == pytest.approx(0.003 + 2 * 0.5 * 0.01)
    assert any("no price in nats is known for wgrad:" in note for note in found.notes)
    cheap = search(s, max_gap=0.0003 + 2 * 0.5 * 0.001)  # nothing of what is priced moves
    assert {site.gemm for site, label in cheap.chosen.items() if label != BASE} == {"wgrad"}


def test_sites_that_hurt_the_gradient_least_move_first() -> None:
    s = sensitivity({"a": 0.001, "b": 0.001})
    s.effects[Site("b", "wgrad")][SR] = noise(0.02, 1e-5)  # more noise than others, but hardly a bias
    found = search(s, saving=1 / 6)
    assert [str(site) for site, label in found.chosen.items() if label != BASE] == ["b wgrad"]


def test_groups_move_together() -> None:
    s = sensitivity({"x.0.a": 0.001, "x.0.b": 0.001, "x.1.a": 0.001})
    s.layers = {name: replace(info, group=name[:3]) for name, info in s.layers.items()}
    s.effects[Site("x.0.a", "dgrad")][SR] = noise(0.005, 0.0001)  # little, but the other layer of its group has more
    found = search(s, saving=1 / 9)
    assert [str(site) for site, label in found.chosen.items() if label != BASE] in (["x.0.a wgrad"], ["x.1.a wgrad"])
    found = search(s, saving=5 / 9)
    assert found.chosen[Site("x.0.a", "dgrad")] == found.chosen[Site("x.0.b", "dgrad")] == SR
    apart = search(s, saving=1 / 9, together=())
    assert [str(site) for site, label in apart.chosen.items() if label != BASE] == ["x.0.a dgrad"]
    found = search(s, saving=7 / 9, together=GEMMS)
    moved = {site for site, label in found.chosen.items() if label != BASE}
    assert {gemm for gemm in GEMMS if Site("x.0.a", gemm) in moved} == {
        gemm for gemm in GEMMS if Site("x.0.b", gemm) in moved
    }


# ---- bytes -----------------------------------------------------------------------------------------


def bytes_of(s: Sensitivity, recipe: Any) -> dict[str, int]:
    found = {"saved": 0, "gathered": 0}
    for name, i in s.layers.items():
        own = layer_estimate(recipe, name, tokens=i.tokens, inputs=i.inputs, outputs=i.outputs)
        found["saved"] += own.saved_input + own.saved_weight
        found["gathered"] += own.gathered.forward + own.gathered.backward
    return found


def test_bytes_are_limited_by_the_formats_that_hurt_least() -> None:
    s = sensitivity({f"l.{i}": 0.001 * (i + 1) for i in range(4)})
    for i in range(4):
        s.effects[Site(f"l.{i}", "wgrad")][SR] = noise(0.01, 0.001 * (4 - i))
    base = bytes_of(s, BASE)
    found = search(s, bytes={"saved": 0.8})
    assert found.bytes == bytes_of(s, found.recipe) and found.base_bytes == base
    assert found.bytes["saved"] <= 0.8 * base["saved"]
    assert {site.gemm for site, label in found.chosen.items() if label != BASE} <= set(BACKWARD)
    assert found.chosen[Site("l.3", "wgrad")] == SR and found.chosen[Site("l.0", "wgrad")] == BASE
    same = search(s, bytes={"saved": math.floor(0.8 * base["saved"])})
    assert same.chosen == found.chosen
    both = search(s, bytes={"saved": 0.8, "gathered": 0.6})
    assert both.bytes["saved"] <= 0.8 * base["saved"] and both.bytes["gathered"] <= 0.6 * base["gathered"]
    moved = [site.layer for site, label in both.chosen.items() if label != BASE and site.gemm == "fprop"]
    assert moved == [f"l.{i}" for i in range(len(moved))] and moved  # gathered rows are those of fprop


def test_no_gemm_gets_slower_for_fewer_bytes() -> None:
    s = sensitivity({"a": 0.001, "b": 0.002})
    s.candidates = {**CANDIDATES, "hp": dict.fromkeys(GEMMS, "hp")}
    for site, effects in s.effects.items():
        effects["hp"] = loss(0.0) if site.gemm == "fprop" else noise(0.0, 0.0)
    assert search(s, saving=0.1).chosen[Site("b", "fprop")] == "hp"  # what others save can be spent
    assert "hp" not in search(s, bytes={"saved": 0.7}).chosen.values()


# ---- rules -----------------------------------------------------------------------------------------


def test_rules_are_kept_and_stay_in_the_text() -> None:
    s = sensitivity({"blocks.0.fc": 0.001, "blocks.1.fc": 0.002, "head": 0.1}, left_out={"router": "by default"})
    rules = ["head: hp", "first 1 block: mxfp8", "router: hp", "nowhere: hp"]
    found = search(s, saving=1, rules=rules)
    assert str(found.recipe) == (
        "fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8; blocks.1.fc: nvfp4(rht, sr); head: hp; "
        "first 1 block (blocks.0): mxfp8; router: hp; nowhere: hp"
    )
    assert set(found.chosen) == {Site("blocks.1.fc", gemm) for gemm in GEMMS}
    assert found.fixed[Site("head", "dgrad")] == "rule 1 (head)"
    assert found.fixed[Site("blocks.0.fc", "fprop")] == "rule 2 (first 1 block)"
    assert found.predicted.mean == pytest.approx(0.0001 + 0.002)  # mxfp8 in block 0, nothing for the head
    assert found.saving == pytest.approx(1) and "the rule 'nowhere' matches no layer that is known here" in found.notes
    own = replace(s, base="mxfp8; head: hp; first 1 block: mxfp8")
    for site, effects in own.effects.items():
        effects[own.base] = (
            Effect(loss=estimate(0), noise=estimate(0), bias=estimate(0)) if site.layer == "head" else effects[BASE]
        )
    assert search(own, saving=1).recipe == search(s, saving=1, rules=rules[:2]).recipe


def test_a_gap_includes_what_cannot_move() -> None:
    s = sensitivity({"a": 0.001, "b": 0.1})
    for gap, label in ((0.0115, SR), (0.0105, BASE)):  # b has 0.01 of it, a 0.001 if it moves
        found = search(s, max_gap=gap, rules=["b: mxfp8"])
        assert found.chosen[Site("a", "fprop")] == label
        assert found.predicted.mean == pytest.approx(0.01 + (0.001 if label == SR else 0.0001))


def test_a_rule_with_a_format_that_was_not_measured_is_not_predicted() -> None:
    s = sensitivity({"a": 0.001, "b": 0.002})
    found = search(s, saving=1, rules=["b: fprop: mxfp4"])
    assert found.predicted.mean == pytest.approx(0.001)
    assert any(
        note.startswith("rule 1 (b) has a format that was not measured there") and "b fprop" in note
        for note in found.notes
    )
    measured = search(s, saving=1, rules=["b: fprop: nvfp4"])
    assert measured.predicted.mean == pytest.approx(0.003) and Site("b", "fprop") not in measured.chosen


# ---- what was not measured -------------------------------------------------------------------------


def test_what_was_not_measured_stays_in_the_base_and_is_named() -> None:
    s = sensitivity({"a": 0.001, "b": 0.002, "c": 0.003}, interrupted=True, left_out={"d": "it was not called"})
    del s.effects[Site("a", "fprop")][SR], s.effects[Site("a", "fprop")][NEAREST]
    s.effects[Site("b", "fprop")][SR] = loss(math.nan)
    s.effects[Site("b", "fprop")][NEAREST] = loss(math.inf)
    del s.effects[Site("c", "dgrad")]
    s.effects[Site("c", "wgrad")][BASE] = Effect()
    found = search(s, saving=1)
    assert found.saving == pytest.approx(1)
    stays = [Site("a", "fprop"), Site("b", "fprop"), Site("c", "dgrad"), Site("c", "wgrad")]
    assert not any(formats(s, found, *site) != "mxfp8 x mxfp8" for site in stays)
    assert not set(stays) & set(found.chosen)
    notes = "\n".join(found.notes)
    assert "nvfp4(rht, sr) was not measured there: a fprop, b fprop" in notes
    assert "the base was not measured there, so they stay in it and are not predicted: c dgrad, c wgrad" in notes
    assert "not everything was measured of d" in notes and "interrupted" in notes
    assert not any(rule.matcher.matches("d", "linear") for rule in found.recipe.rules)


def test_a_base_without_a_finite_effect_is_not_predicted() -> None:
    s = sensitivity({"a": 0.001, "b": 0.002})
    s.effects[Site("b", "fprop")][BASE] = loss(math.nan)
    found = search(s, saving=1)
    assert found.predicted.mean == pytest.approx(0.001)
    json.loads(json.dumps(found.to_dict()), parse_constant=pytest.fail)


def test_candidates_that_cannot_be_used_are_named() -> None:
    s = sensitivity({"a": 0.001})
    s.candidates = {**CANDIDATES, "odd": {"fprop": "nvfp4(sr)", "dgrad": "mxfp4"}}
    for effects in s.effects.values():
        effects["odd"] = effects[SR]
    found = search(s, saving=1)
    assert "odd" not in (found.chosen[Site("a", "fprop")], found.chosen[Site("a", "wgrad")])
    assert any("odd cannot be used for fprop (sr is meant for the gradient operand" in note for note in found.notes)
    assert any("odd has no format for wgrad" in note for note in found.notes)


def test_formats_without_a_rate_are_named() -> None:
    found = search(sensitivity({"a": 0.001}), saving=1, device="b200")
    assert not any("counted as bf16" in note for note in found.notes)
    s = sensitivity({"a": 0.001})
    s.base, s.candidates = "hp", {"hp": dict.fromkeys(GEMMS, "hp"), "fp8": dict.fromkeys(GEMMS, "fp8"), **CANDIDATES}
    for site, effects in s.effects.items():
        effects["hp"] = loss(0.0) if site.gemm == "fprop" else noise(0.0, 0.0)
        effects["fp8"] = effects[SR]
    found = search(s, saving=1, device="h100", rules=["a: wgrad: nvfp4"])
    assert any("nvfp4: h100 has no rate for it, so it is counted as bf16" in note for note in found.notes)
    assert found.chosen[Site("a", "fprop")] == "fp8"


# ---- wrong input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"give one target: saving=0.8, max_gap=0.003 or bytes=\{'saved': 0.6\}; got none"),
        ({"saving": 0.5, "max_gap": 0.1}, "got saving and max_gap"),
        ({"saving": 1.2}, "saving must be a share from 0 to 1 of what can be saved, got 1.2"),
        ({"saving": math.nan}, "saving must be a share"),
        ({"max_gap": 1e-4}, "max_gap=0.0001 cannot be reached: the lowest gap .* is 0.0003 nats per token; .* 0.0003"),
        ({"max_gap": math.inf}, "max_gap must be a number"),
        ({"bytes": {"saved": 0.3}}, r"bytes=\{'saved': 0.3\} cannot be reached: the fewest saved bytes .* 0.545 of"),
        ({"bytes": {"kept": 0.3}}, "bytes must be limits of 'saved' or 'gathered'"),
        ({"bytes": 0.5}, "bytes must be limits of"),
        ({"bytes": {"saved": 0}}, "a limit of bytes must be above 0, got saved: 0"),
        ({"saving": 0.5, "tokens": 0}, "tokens must be at least 1"),
        ({"saving": 0.5, "scale": 0}, "scale must be a number above 0"),
        ({"saving": 0.5, "device": "b201"}, "there is no device 'b201'"),
        ({"saving": 0.5, "together": ["bgrad"]}, "together must be some of fprop, dgrad, wgrad"),
        ({"saving": 0.5, "device": "a100"}, "no candidate is faster than mxfp8 at the sizes of these layers"),
        ({"saving": 0.5, "rules": ["*: hp"]}, "there is nothing to choose: rules decide all of them"),
        ({"saving": 0.5, "rules": ["last 10 % of steps: hp"]}, "phase"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(sensitivity({"a": 0.001, "b": 0.002}), **options)


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="there is nothing to choose: it has no site with a measured candidate"):
        search(Sensitivity(BASE, CANDIDATES), saving=0.5)
    s = sensitivity({"a": 0.001})
    s.effects = {site: {BASE: effects[BASE]} for site, effects in s.effects.items()}
    with pytest.raises(ValueError, match=r"nothing to choose: nvfp4\(rht, sr\) was not measured there: a fprop"):
        search(s, saving=0.5)
    with pytest.raises(
        ValueError, match="the calibration of 'fprop' must be nats per unit of noise for dgrad or wgrad, got 1"
    ):
        search(sensitivity({"a": 0.001}, calibration={"fprop": 1}), saving=0.5)
    with pytest.raises(RecipeSyntaxError):
        search(sensitivity({"a": 0.001}), saving=0.5, rules=["a: mxpf8"])


# ---- costs -----------------------------------------------------------------------------------------


def test_costs_are_those_of_the_run_that_is_planned() -> None:
    s = sensitivity({"a": 0.001, "b": 0.001}, sizes={"a": (64, 64), "b": (64, 128)})
    s.layers["b"] = replace(s.layers["b"], module_type="grouped_linear", tokens=16384, experts=4)  # two experts a token
    found = search(s, saving=1, tokens=16384, scale=64)
    sizes = {"inputs": 4096, "device": "b200"}
    expected = sum(gemm_seconds(BASE, tokens=16384, outputs=4096, **sizes).values()) + sum(
        gemm_seconds(BASE, tokens=32768, outputs=8192, module_type="grouped_linear", experts=4, **sizes).values()
    )
    assert found.base_seconds == pytest.approx(expected, rel=1e-12)
    assert found.seconds == pytest.approx(expected / 2, rel=1e-12)
    assert "b200, 16,384 tokens, as if it were 64 times as wide" in found.target


def test_the_recipe_itself_reaches_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the sum of its moves: here all of them together save a fifth less, unless everything moves."""
    s = sensitivity({f"l.{i}": 0.001 * (i + 1) for i in range(6)})
    plain, base = Costs.of_all, seconds_of(s, BASE)

    def of_all(costs: Costs, recipe: GemmRecipe) -> Cost:
        cost = plain(costs, recipe)
        saved = base - cost.seconds
        return cost if saved > 0.49 * base else replace(cost, seconds=base - 0.8 * saved)

    monkeypatch.setattr(Costs, "of_all", of_all)
    found = search(s, saving=0.5)
    assert 0.5 <= found.saving < 0.6
    assert sum(label != BASE for label in found.chosen.values()) == 12  # 9 of 18 would be enough
    assert any("do not add up exactly" in note for note in found.notes)
    nearly = search(s, saving=0.9)
    assert nearly.saving == pytest.approx(1) and not nearly.proven
    assert any("not proven" in note for note in nearly.notes)


def test_padding_is_said_to_matter() -> None:
    s = sensitivity({"a": 0.001, "b": 0.001}, sizes=dict.fromkeys("ab", (144, 272)))
    s.layers = {name: replace(info, tokens=48) for name, info in s.layers.items()}
    s.base, s.candidates = "hp", {"hp": dict.fromkeys(GEMMS, "hp"), BASE: CANDIDATES[BASE]}
    for site, effects in s.effects.items():
        effects["hp"] = loss(0.0) if site.gemm == "fprop" else noise(0.0, 0.0)
    found = search(s, saving=1, device="b200, bandwidth=1")  # only bytes count
    assert found.saving == pytest.approx(1)
    assert any("layers of these sizes are padded" in note for note in found.notes)
    assert found.seconds == pytest.approx(seconds_of(s, found.recipe, "b200, bandwidth=1"), rel=1e-12)


# ---- the frontier and the result -------------------------------------------------------------------


def test_a_frontier_has_the_recipes_of_a_search() -> None:
    s = sensitivity({f"l.{i}": 0.001 * (i + 1) ** 2 for i in range(5)})
    points = frontier(s, points=21, rules=["l.0: dgrad: hp"])
    assert points[0].saving == pytest.approx(0, abs=1e-9) and points[-1].saving == pytest.approx(1)
    assert all(first.saving < second.saving for first, second in itertools.pairwise(points))
    assert all(first.predicted.mean <= second.predicted.mean for first, second in itertools.pairwise(points))
    assert len({point.recipe for point in points}) == len(points) <= 21
    for point in points:
        found = search(s, saving=min(1, point.saving), rules=["l.0: dgrad: hp"])
        assert (str(found.recipe), found.chosen, found.predicted) == (point.recipe, point.chosen, point.predicted)
    with pytest.raises(ValueError, match="at least 2 points"):
        frontier(s, points=1)


def test_the_method_of_a_sensitivity_searches() -> None:
    s = sensitivity({"a": 0.001, "b": 0.002})
    assert s.search(saving=0.5).to_dict() == search(s, saving=0.5).to_dict()


def test_results_are_plain_data_and_text() -> None:
    s = sensitivity({"a": 0.001, "b": 0.0011, "c": 0.005})
    s.effects[Site("a", "fprop")][SR] = replace(loss(0.001), loss=estimate(0.001, math.inf))
    found = search(s, saving=0.8, rules=["c: wgrad: hp"])
    data = json.loads(json.dumps(found.to_dict()))
    assert Found.from_dict(data) == found and math.isinf(found.predicted.high)
    text = str(found)
    assert str(found.recipe) in text and "dgrad" in text and found.notes[0] in text and f"{found.saving:.3f}" in text
    with pytest.raises(ValueError, match="this is not a found recipe of version 1: its version is 7"):
        Found.from_dict({**data, "version": 7})
    with pytest.raises(ValueError, match="this is not a found recipe: KeyError"):
        Found.from_dict({"version": 1})
