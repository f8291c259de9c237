"""`Problem`: what a search chooses from: sites that move together, and for each move formats with cost and effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...gemm.operands import GEMMS
from ...planning.network import skeleton_of
from ...recipe import GemmRecipe, Rule
from ...recipe.binding import Layer, bound
from ...recipe.compact import deciding_rule
from ...recipe.format_spec import FormatSpec
from ...recipe.layer_formats import make_settings, operands_of
from ...recipe.rules import Blocks
from ..intervals import Estimate
from ..sensitivity.result import Effect, Sensitivity, Site
from .costs import Cost, Costs, total
from .effects import BACKWARD, NOTHING, added, is_exact, is_measured, nats, rank


@dataclass(frozen=True)
class Choice:
    """One format for a move.

    Attributes:
        label: label of the candidate; the text of the base for the base.
        cost: difference to the cost of the base.
        nats: effect in nats, of all sites of the move.
        rank: how bad it is for the gradient, see `effects.rank`.
        bias: the part of it that is bias.
    """

    label: str
    cost: Cost
    nats: Estimate
    rank: float
    bias: Estimate


@dataclass(frozen=True)
class Move:
    """Sites of one GEMM that get the same candidate. The first choice is the base."""

    gemm: str
    sites: tuple[Site, ...]
    choices: tuple[Choice, ...]


@dataclass
class Problem:
    """What a search chooses from.

    Attributes:
        s: the sensitivity.
        costs: costs of layers.
        recipe: the base with the user's rules, bound to the names of the layers.
        layers: all layers that are known by name.
        moves: what can be chosen.
        fixed: sites that a rule decides, and the rule.
        effects: the effect of each fixed site, and of each site that stays in the base; None if it is not known.
        base: the cost of the base.
        notes: what was left out, and why.
    """

    s: Sensitivity
    costs: Costs
    recipe: GemmRecipe
    layers: list[Layer]
    moves: list[Move] = field(default_factory=list)
    fixed: dict[Site, str] = field(default_factory=dict)
    effects: dict[Site, Effect | None] = field(default_factory=dict)
    base: Cost = field(default_factory=Cost)
    notes: list[str] = field(default_factory=list)

    @property
    def fastest(self) -> list[int]:
        """The number of the fastest choice of each move."""
        return [
            min(range(len(own)), key=lambda i: own[i].cost.seconds) for own in (move.choices for move in self.moves)
        ]

    def formats_of(self, chosen: Sequence[int]) -> dict[tuple[str, str], str]:
        """The formats of the sites that are not in the base, from the number of each move's choice."""
        found = {}
        for move, number in zip(self.moves, chosen, strict=True):
            if number:
                text = self.s.candidates[move.choices[number].label][move.gemm]
                found.update({(site.layer, site.gemm): text for site in move.sites})
        return found


def problem_of(
    s: Sensitivity, costs: Costs, rules: Iterable[Rule | str | tuple[str, Any]], together: Iterable[str]
) -> Problem:
    """Make the problem of a sensitivity.

    Raises:
        ValueError: no site can move, or a rule is wrong.
    """
    layers = [Layer(name, info.module_type) for name, info in s.layers.items()]
    known = {layer.name for layer in layers}
    layers += [Layer(name) for name in s.left_out if name not in known]
    problem = Problem(s, costs, GemmRecipe.load(s.base), layers)
    problem.recipe, unmatched = _with_rules(problem.recipe, rules, layers)
    problem.notes += [f"the rule '{pattern}' matches no layer that is known here" for pattern in unmatched]
    problem.base = costs.of_all(problem.recipe)
    _Maker(problem, set(together)).make()
    return problem


def _with_rules(
    base: GemmRecipe, rules: Iterable[Rule | str | tuple[str, Any]], layers: Sequence[Layer]
) -> tuple[GemmRecipe, list[str]]:
    """The base with more rules, whose blocks are found by names; and the patterns that match no layer."""
    recipe = base.with_rules([*base.rules, *rules])
    if any(isinstance(rule.matcher, Blocks) for rule in recipe.rules):
        skeleton = skeleton_of([(layer.name, layer.module_type) for layer in layers])
        recipe = recipe.with_rules(
            replace(rule, matcher=bound(rule.matcher, skeleton, layers, recipe.blocks))
            if isinstance(rule.matcher, Blocks)
            else rule
            for rule in recipe.rules
        )
    index = recipe.rule_index
    matched = {place for layer in layers for place in index.places(layer.name, layer.module_type)}
    return recipe, [str(single) for place, single in index.singles() if place not in matched]


class _Maker:
    """Finds the moves of a problem."""

    def __init__(self, problem: Problem, together: set[str]) -> None:
        self.problem, self.together = problem, together
        self.s, self.costs = problem.s, problem.costs
        own = len(GemmRecipe.load(self.s.base).rules)
        self.base = problem.recipe.with_rules(problem.recipe.rules[:own])  # as it was measured
        self.excluded: dict[str, list[str]] = {}  # sites by reason
        self.changed = {
            (label, gemm): self._changed(label, gemm)
            for label in self.s.candidates
            if label != self.s.base
            for gemm in GEMMS
        }

    def make(self) -> None:
        problem, groups = self.problem, dict[tuple[str, str], list[Site]]()
        for name, info in self.s.layers.items():
            layer = Layer(name, info.module_type)
            for gemm in GEMMS:
                site = Site(name, gemm)
                rule = deciding_rule(problem.recipe, layer, gemm)
                problem.effects[site] = self._effect_in_recipe(site, layer)
                if rule is not None:
                    problem.fixed[site] = rule
                elif is_measured(problem.effects[site], gemm):
                    group = info.group if gemm in self.together and info.group else name
                    groups.setdefault((gemm, group), []).append(site)
                else:
                    self._exclude("the base was not measured there, so they stay in it and are not predicted", site)
                if rule is not None and not is_measured(problem.effects[site], gemm):
                    self._exclude(f"{rule} has a format that was not measured there, so they are not predicted", site)
        for (gemm, _), sites in groups.items():
            move = self._move(gemm, tuple(sites))
            if len(move.choices) > 1:
                problem.moves.append(move)
        problem.notes += [f"{reason}: {listed(names)}" for reason, names in self.excluded.items()]
        if not problem.moves:
            why = "; ".join(problem.notes) or (
                "rules decide all of them" if problem.fixed else "it has no site with a measured candidate"
            )
            raise ValueError(f"there is nothing to choose: {why}")

    def _changed(self, label: str, gemm: str) -> GemmRecipe | str:
        """The base with one GEMM of all layers in a candidate, under the rules; or why there is none."""
        text = self.s.candidates[label].get(gemm)
        if text is None:
            return f"{label} has no format for {gemm}"
        try:
            settings = make_settings({gemm: text})
            return self.problem.recipe.with_rules([("*", dict(settings)), *self.problem.recipe.rules])
        except ValueError as error:
            return f"{label} cannot be used for {gemm} ({str(error).splitlines()[0]})"

    def _effect_in_recipe(self, site: Site, layer: Layer) -> Effect | None:
        """The effect of what the recipe with its rules gives a site; None if this was not measured."""
        specs = self._specs(self.problem.recipe, layer, site.gemm)
        measured = self.s.effects.get(site, {})
        if specs == self._specs(self.base, layer, site.gemm):
            return measured.get(self.s.base)
        if is_exact(specs):
            return Effect(loss=NOTHING, noise=NOTHING, bias=NOTHING)
        for label, effect in measured.items():
            if label != self.s.base and specs == tuple(
                operands_of(FormatSpec.parse(self.s.candidates[label][site.gemm]), site.gemm).values()
            ):
                return effect
        return None

    @staticmethod
    def _specs(recipe: GemmRecipe, layer: Layer, gemm: str) -> tuple[FormatSpec, ...]:
        formats = recipe.layer_formats(layer.name, layer.module_type)
        return tuple(formats.format(gemm, tensor).value for tensor in GEMMS[gemm])

    def _is_same(self, recipe: GemmRecipe, site: Site) -> bool:
        layer = Layer(site.layer, self.s.layers[site.layer].module_type)
        return self._specs(recipe, layer, site.gemm) == self._specs(self.problem.recipe, layer, site.gemm)

    def _exclude(self, reason: str, *sites: Site) -> None:
        self.excluded.setdefault(reason, []).extend(map(str, sites))

    def _move(self, gemm: str, sites: tuple[Site, ...]) -> Move:
        effects = [self.problem.effects[site] for site in sites]
        choices = [self._choice(self.s.base, gemm, Cost(), effects)]
        for label in self.s.candidates:
            if label == self.s.base:
                continue
            recipe = self.changed[label, gemm]
            if isinstance(recipe, str):
                self._exclude(recipe, *sites)
                continue
            if all(self._is_same(recipe, site) for site in sites):
                continue
            found = [self.s.effects.get(site, {}).get(label) for site in sites]
            missing = [site for site, effect in zip(sites, found, strict=True) if not is_measured(effect, gemm)]
            if missing:
                rest = " (the other layers of their groups stay in the base, too)" if len(missing) < len(sites) else ""
                self._exclude(f"{label} was not measured there{rest}", *missing)
                continue
            cost = self._cost(recipe, sites)
            if isinstance(cost, str):
                self._exclude(f"{label} does not fit ({cost})", *sites)
                continue
            choices.append(self._choice(label, gemm, cost, found))
        return Move(gemm, sites, tuple(_least_biased(choices) if gemm in BACKWARD else choices))

    def _cost(self, recipe: GemmRecipe, sites: Sequence[Site]) -> Cost | str:
        """What it costs more than the base to move sites, each alone; or why they cannot be moved."""
        more = Cost()
        for site in sites:
            try:
                new, old = (self.costs.estimate(each, site.layer) for each in (recipe, self.problem.recipe))
            except ValueError as error:
                return str(error)
            more += total(new) - total(old)  # with padding, other GEMMs of the layer may get slower, too
        return more

    def _choice(self, label: str, gemm: str, cost: Cost, effects: Sequence[Effect | None]) -> Choice:
        known = [effect for effect in effects if effect is not None]
        return Choice(
            label,
            cost,
            added(nats(self.s, effect, gemm) for effect in known),
            sum(rank(effect, gemm) for effect in known),
            added(effect.bias or NOTHING for effect in known),
        )


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _least_biased(choices: Sequence[Choice]) -> list[Choice]:
    """Of backward formats that cost the same, the one with the least bias: noise alone orders them wrongly."""
    best: dict[Cost, Choice] = {}
    for choice in choices:
        known = best.get(choice.cost)
        if known is None or (choice.bias.mean, choice.rank) < (known.bias.mean, known.rank):
            best[choice.cost] = choice
    base, kept = choices[0], list(best.values())
    return kept if kept[0] is base else [base, *kept]
