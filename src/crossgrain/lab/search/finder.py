"""`Finder`: searches in one problem, target by target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...gemm.operands import GEMMS
from ...recipe import GemmRecipe, Rule, recipe_of_sites
from ..intervals import Estimate
from ..sensitivity.as_measured import as_measured
from ..sensitivity.result import Effect, Sensitivity, Site
from .costs import BYTES, Cost, Costs
from .effects import BACKWARD, NOTHING, added, check_calibration, gemms_without_price, is_measured, nats
from .found import Found
from .knapsack import Solution
from .problem import Problem, listed, problem_of
from .solver import NEAR, Solver
from .ties import ties_of

_TRIES = 8  # until the cost of the recipe keeps the target, and not only the sum of its moves

Rules = Iterable[Rule | str | tuple[str, Any]]


@dataclass(frozen=True)
class Point:
    """One recipe of a frontier.

    Attributes:
        saving: share of the GEMM time that is saved, of what can be saved.
        seconds: time of the GEMMs of all measured layers.
        predicted: gap to high precision in nats per token.
        recipe: the recipe, as text.
        chosen: label of a candidate, or the base, for every site that was free to move.
        proven: no other choice saves as much with less predicted harm.
    """

    saving: float
    seconds: float
    predicted: Estimate
    recipe: str
    chosen: dict[Site, str]
    proven: bool


class Finder:
    """Searches in one problem."""

    def __init__(self, s: Sensitivity, costs: Costs, rules: Rules, together: Iterable[str]) -> None:
        together = list(together)
        if not set(together) <= set(GEMMS):
            raise ValueError(f"together must be some of {', '.join(GEMMS)}, got {together}")
        check_calibration(s)
        self.s, self.costs = s, costs
        self.problem: Problem = problem_of(s, costs, rules, together)
        self.solver = Solver(self.problem)
        self._known: dict[tuple[int, ...], tuple[GemmRecipe, Cost]] = {}

    @cached_property
    def possible(self) -> float:
        """The seconds that are saved if every site that may move has its fastest candidate."""
        return self.problem.base.seconds - self._cost(self.problem.fastest).seconds

    def check_that_time_can_be_saved(self) -> None:
        """Raise ValueError if no candidate is faster than the base."""
        if self.possible <= 0:
            raise ValueError(
                f"no candidate is faster than {self.s.base} at the sizes of these layers ({self.costs}). GEMMs that "
                "wait for memory hardly differ: pass the tokens and the scale of the run that is planned"
            )

    # ---- targets -----------------------------------------------------------------------------------

    def at_saving(self, share: float) -> Found:
        """Save a share of what can be saved."""
        if not 0 <= share <= 1:
            raise ValueError(f"saving must be a share from 0 to 1 of what can be saved, got {share}")
        self.check_that_time_can_be_saved()
        return self._found(
            self.solution_at(share),
            f"save at least {share:g} of the GEMM time that can be saved ({self.costs})",
            lambda cost: cost.seconds <= -(share - NEAR) * self.possible,
        )

    def solution_at(self, share: float) -> Solution:
        """The solution that saves a share of what can be saved."""
        solution, more = self.solver.at_saving(share), 0.0
        for _ in range(_TRIES):
            if solution is None:
                break
            short = share * self.possible - (self.problem.base.seconds - self._cost(solution.options).seconds)
            if short <= NEAR * self.possible:
                return solution
            more += short  # with padding, GEMMs that move together may take longer than the sum of their moves
            solution = self.solver.at_saving(share, more)
        return Solution(self.problem.fastest, 0, proven=False)

    def within_gap(self, gap: float) -> Found:
        """Save as much as possible within a gap."""
        if not math.isfinite(gap):
            raise ValueError(f"max_gap must be a number of nats per token, got {gap}")
        self.check_that_time_can_be_saved()
        staying = self._nats_that_stay()
        solution = self.solver.within_gap(gap - staying.mean)
        if solution is None:
            best = self.solver.least("nats") + staying.mean
            base = self._predicted([0] * len(self.problem.moves)).mean
            raise ValueError(
                f"max_gap={gap:g} cannot be reached: the lowest gap that can be predicted with these candidates is "
                f"{best:.4g} nats per token; that of the base is {base:.4g}"
            )
        return self._found(
            solution,
            f"save as much GEMM time as possible with at most {gap:g} nats per token ({self.costs})",
            None,
        )

    def within_bytes(self, limits: Mapping[str, float]) -> Found:
        """Keep limits of bytes."""
        if not isinstance(limits, Mapping) or not limits or not set(limits) <= set(BYTES):
            raise ValueError(
                f"bytes must be limits of {' or '.join(map(repr, BYTES))}, like {{'saved': 0.6}}, got {limits!r}"
            )
        base = {name: getattr(self.problem.base, name) for name in BYTES}
        wanted: dict[str, int] = {}
        for name, limit in limits.items():
            if not limit > 0:
                raise ValueError(f"a limit of bytes must be above 0, got {name}: {limit}")
            wanted[name] = math.floor(limit * base[name] if limit <= 1 else limit)
            least = base[name] + round(self.solver.least(name))
            if least > wanted[name]:
                raise ValueError(
                    f"bytes={{{name!r}: {limit:g}}} cannot be reached: the fewest {name} bytes of these candidates are "
                    f"{least:,}, that is {least / base[name]:.3f} of those of the base"
                )
        more = {name: wanted[name] - base[name] for name in wanted}
        solution, missed = self.solver.within_bytes(more), False
        for _ in range(_TRIES):
            if solution is None:
                break
            cost = self._cost(solution.options)
            over = {name: getattr(cost, name) - wanted[name] for name in wanted}
            missed = max(over.values()) > 0
            if not missed:
                break
            more = {name: more[name] - max(0, over[name]) for name in wanted}
            solution = self.solver.within_bytes(more)
        if solution is None or missed:
            raise ValueError(f"bytes={dict(limits)!r} cannot be reached: no choice keeps all limits together")
        return self._found(
            solution,
            "keep " + " and ".join(f"{name} bytes within {wanted[name]:,}" for name in wanted) + f" ({self.costs})",
            lambda cost: all(getattr(cost, name) <= more[name] for name in wanted),
        )

    # ---- results -----------------------------------------------------------------------------------

    def point(self, solution: Solution) -> Point:
        """A point of a frontier."""
        recipe, cost = self._recipe(solution.options), self._cost(solution.options)
        predicted, chosen = self._predicted(solution.options), self._chosen(solution.options)
        return Point(self._saving(cost), cost.seconds, predicted, str(recipe), chosen, solution.proven)

    def _recipe(self, options: Sequence[int]) -> GemmRecipe:
        return self._made(tuple(options))[0]

    def _cost(self, options: Sequence[int]) -> Cost:
        """The cost of the recipe itself. If layers are padded, it differs from the sum of its moves."""
        return self._made(tuple(options))[1]

    def _made(self, options: tuple[int, ...]) -> tuple[GemmRecipe, Cost]:
        if options not in self._known:
            recipe = recipe_of_sites(self.problem.recipe, self.problem.formats_of(options), self.problem.layers)
            recipe = as_measured(recipe, self.s, self.problem.recipe)
            self._known[options] = recipe, self.costs.of_all(recipe)
        return self._known[options]

    def _chosen(self, options: Sequence[int]) -> dict[Site, str]:
        labels = {
            site: move.choices[i].label
            for move, i in zip(self.problem.moves, options, strict=True)
            for site in move.sites
        }
        return {site: labels[site] for site in self.problem.effects if site in labels}

    def _effects(self, options: Sequence[int]) -> dict[Site, Effect]:
        """The effects of all sites; those that are not known are left out."""
        effects = dict(self.problem.effects)
        effects.update(
            {site: self.s.effects[site][label] for site, label in self._chosen(options).items() if label != self.s.base}
        )
        return {
            site: effect for site, effect in effects.items() if effect is not None and is_measured(effect, site.gemm)
        }

    def _predicted(self, options: Sequence[int]) -> Estimate:
        return added(nats(self.s, effect, site.gemm) for site, effect in self._effects(options).items())

    def _nats_that_stay(self) -> Estimate:
        moving = {site for move in self.problem.moves for site in move.sites}
        return added(
            nats(self.s, effect, site.gemm)
            for site, effect in self.problem.effects.items()
            if effect is not None and is_measured(effect, site.gemm) and site not in moving
        )

    def _saving(self, cost: Cost) -> float:
        return (self.problem.base.seconds - cost.seconds) / self.possible if self.possible > 0 else 0.0

    def _found(self, solution: Solution, target: str, reaches: Callable[[Cost], bool] | None) -> Found:
        """The result. ``reaches`` says whether a difference to the cost of the base reaches the target."""
        problem, options = self.problem, solution.options
        recipe, cost = self._recipe(solution.options), self._cost(solution.options)
        made = sum((move.choices[i].cost for move, i in zip(problem.moves, options, strict=True)), Cost())
        effects = self._effects(options)
        by_gemm = {gemm: [effect for site, effect in effects.items() if site.gemm == gemm] for gemm in BACKWARD}
        return Found(
            recipe=recipe,
            chosen=self._chosen(options),
            fixed=dict(problem.fixed),
            target=target,
            saving=self._saving(cost),
            seconds=cost.seconds,
            base_seconds=problem.base.seconds,
            bytes={name: getattr(cost, name) for name in BYTES},
            base_bytes={name: getattr(problem.base, name) for name in BYTES},
            predicted=self._predicted(options),
            base_predicted=self._predicted([0] * len(options)),
            noise={gemm: added(effect.noise or NOTHING for effect in own) for gemm, own in by_gemm.items()},
            bias={gemm: added(effect.bias or NOTHING for effect in own) for gemm, own in by_gemm.items()},
            ties=ties_of(
                problem, options, lambda more: reaches(made + more) if reaches is not None else more.seconds <= 0
            ),
            notes=self._notes(recipe, solution, cost - problem.base, made),
            proven=solution.proven,
        )

    def _notes(self, recipe: GemmRecipe, solution: Solution, cost: Cost, made: Cost) -> list[str]:
        notes = []
        unpriced = gemms_without_price(self.s)
        if unpriced:
            notes.append(
                f"no price in nats is known for {' and '.join(unpriced)}: the predicted gap is without them. Sites and "
                "formats with less squared bias and noise move first. A calibration by paired runs prices their noise"
            )
        if self.s.calibration:
            notes.append(
                "bias of backward is in no price: it grows with the number of steps, which a verification shows"
            )
        notes += self.problem.notes
        estimates = [self.costs.estimate(recipe, layer) for layer in self.s.layers]
        slow = dict.fromkeys(fmt for each in estimates for fmt in (*each.without_rate, *each.decoded))
        if slow:
            notes.append(f"{', '.join(slow)}: {self.costs.device.name} has no rate for it, so it is counted as bf16")
        if self.s.left_out:
            names = list(self.s.left_out)
            notes.append(f"not everything was measured of {listed(names)}")
        if self.s.interrupted:
            notes.append("the measurement was interrupted, so intervals are wider than they were meant to be")
        if abs(cost.seconds - made.seconds) > 1e-6 * self.problem.base.seconds:
            notes.append(
                "layers of these sizes are padded, so that the costs of moves do not add up exactly. The target is "
                "checked with the recipe itself, but another choice may be a little better"
            )
        if not solution.proven:
            notes.append("the target is reached, but it is not proven that no other choice is better")
        return notes
