"""`Replay`: what repeating a step has shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .looking import Rounding, Site
from .outcome import Outcome, plain

Verdict = Literal["one operand", "several operands", "spread", "unfinished", "chance", "no difference", "not precision"]


@dataclass(frozen=True)
class Operand:
    """An operand that was raised alone.

    Attributes:
        layer: name of the layer.
        operand: the key of the operand in recipes, such as "dgrad.grad_output".
        format: the format that it was in.
        share: the share of the difference that disappears if this operand alone is in high precision; it may be
            negative.
    """

    layer: str
    operand: str
    format: str
    share: float


@dataclass
class Replay:
    """The result of `replay`. Its text is a report.

    Attributes:
        low: the step as it was.
        high: the step with all operands in high precision.
        measure: what was explained: one of `MEASURES`.
        verdict: "one operand" or "several operands" make the difference; "spread": no few operands do; "unfinished":
            the runs ended before it was known; "chance": other draws of stochastic rounding make no such difference;
            "no difference"; "not precision": high precision has the NaNs as well.
        culprits: the operands that make the difference, or at least half of it; empty if no few operands do.
        share: the share of the difference that disappears if they are in high precision.
        alone: the difference that is left if only they are quantized, as a share; None if that was not measured.
        operands: all operands that were raised alone, the largest share first.
        kinds: the share of all operands of a kind, such as dgrad.grad_output in all layers.
        groups: groups of operands that were raised together and not one by one, with their shares.
        not_examined: operands that cannot be raised, and why.
        roundings: what quantizing did to each operand.
        parameters: by parameter, the norms of its gradient as it was and in high precision, and the norm of their
            difference.
        first_nonfinite: the first operand with NaNs or infinities, if there are any; and whether it had them before it
            was quantized.
        other_draws: the step with other draws of stochastic rounding; empty if there are none.
        expected_loss: the loss that the training run had; None if it is not known.
        runs: number of runs of the step.
        budget: the most runs that were allowed.
        notes: what else should be known.
        complete: the search for operands came to its end: neither the number of runs nor Ctrl-C ended it.
        interrupted: Ctrl-C ended it.
    """

    low: Outcome
    high: Outcome
    measure: str = ""
    verdict: Verdict = "unfinished"
    culprits: list[Site] = field(default_factory=list)
    share: float = 0.0
    alone: float | None = None
    operands: list[Operand] = field(default_factory=list)
    kinds: dict[str, float] = field(default_factory=dict)
    groups: list[tuple[list[Site], float]] = field(default_factory=list)
    not_examined: dict[Site, str] = field(default_factory=dict)
    roundings: dict[Site, Rounding] = field(default_factory=dict)
    parameters: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    first_nonfinite: tuple[Site, bool] | None = None
    other_draws: list[Outcome] = field(default_factory=list)
    expected_loss: float | None = None
    runs: int = 0
    budget: int = 0
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    interrupted: bool = False

    @property
    def rules(self) -> list[str]:
        """Rules for a recipe: the GEMMs of the culprits in high precision, both operands, as hardware needs it."""
        keys: dict[str, dict[str, None]] = {}
        for site in self.culprits:
            gemm = site.operand.partition(".")[0]
            key = site.operand if gemm == "attention" else gemm
            keys.setdefault(site.layer, {})[key] = None
        return [f"{layer}: {', '.join(f'{key}: hp' for key in own)}" for layer, own in keys.items()]

    def __str__(self) -> str:
        from .text import shown

        return shown(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON. Numbers that are NaN or infinite are None."""
        first = self.first_nonfinite
        return {
            "verdict": self.verdict,
            "measure": self.measure,
            "low": self.low.to_dict(),
            "high": self.high.to_dict(),
            "culprits": [{**site._asdict(), **self.roundings[site].to_dict()} for site in self.culprits],
            "share": plain(self.share),
            "alone": plain(self.alone),
            "rules": self.rules,
            "operands": [{**vars(one), "share": plain(one.share)} for one in self.operands],
            "kinds": {kind: plain(share) for kind, share in self.kinds.items()},
            "groups": [
                {"operands": [site._asdict() for site in members], "share": plain(share)}
                for members, share in self.groups
            ],
            "not_examined": [{**site._asdict(), "reason": why} for site, why in self.not_examined.items()],
            "parameters": {
                name: dict(zip(("low", "high", "difference"), map(plain, numbers), strict=True))
                for name, numbers in self.parameters.items()
            },
            "first_nonfinite": None if first is None else {**first[0]._asdict(), "before_quantizing": first[1]},
            "other_draws": [one.to_dict() for one in self.other_draws],
            "expected_loss": plain(self.expected_loss),
            "runs": self.runs,
            "budget": self.budget,
            "notes": self.notes,
            "complete": self.complete,
            "interrupted": self.interrupted,
        }
