"""What a verification may be quoted for, and what not."""

from __future__ import annotations

from ..intervals import with_spread
from .paired import DIVERGED, NOT_ABOVE, NOT_RESOLVED, Paired
from .result import Row, Verification

MAY_NOT = (
    "The final loss of a longer training, its stability, or another model, data set or scale: none of these was run.",
    '"Safe", or "the same as the baseline": a gap that is not resolved may be there, and one that is not above the '
    "tolerance may be anything below it.",
    "That a gap stays as it is: what accumulates over steps, such as a bias of gradients, is smaller in a short run "
    "than in a long one. See the gap by step.",
    "That all intervals hold at once: each contains its true value in 95 of 100 cases, taken alone.",
)


def claims(result: Verification) -> tuple[list[str], list[str]]:
    """What the runs of a verification show, and what they do not show, as sentences.

    Returns:
        What may be claimed, and what may not.
    """
    rows = [row for row in result.rows() if row.label != result.baseline]
    may = [sentence for row in rows for sentence in _about(row, result)]
    may += [sentence for label in result.labels for sentence in _about_control(label, result)]
    may_not = list(MAY_NOT)
    if lost := result.diverged(result.baseline):
        seeds = ", ".join(map(str, lost))
        may_not.insert(0, f"Anything about seeds with which the baseline itself diverged: {seeds}.")
    if result.ignores_seeds():
        may_not.insert(
            0,
            "Anything about other data: all seeds gave the baseline the same losses, so the branch ignores its seed, "
            "and the runs count as one.",
        )
    if result.interrupted:
        may_not.insert(0, "Anything about runs that are missing: the verification was stopped early.")
    return may, may_not


def _about(row: Row, result: Verification) -> list[str]:
    if row.verdict == DIVERGED:
        places = ", ".join(f"with seed {seed} at step {step}" for seed, step in row.diverged.items())
        return [f"{row.label} diverged {places}."]
    if row.paired is None:
        return []
    found, gap = row.paired, row.paired.gap
    if gap.count == 1:
        return [f"{row.label}: one seed gives a gap of {gap.mean:.3g}; how far it is from chance is not known."]
    sentences = [
        f"{row.label}: from this start, on this data, the mean gap to {result.baseline} over the last {result.last} of "
        f"{result.steps} steps is {gap} (95 % interval over {gap.count} seeds)" + _verdict(found)
    ]
    if found.grows and found.growth is not None:
        sentences.append(
            f"{row.label}: the gap grew by {_per_hundred(found)} in 100 steps. A longer run may have a "
            "larger one: run longer before you use it."
        )
    elif found.growth is not None:
        least = found.growth.half_width * result.steps
        sentences.append(
            f"{row.label}: no growth was seen. {gap.count} seeds of {result.steps} steps cannot tell a growth below "
            f"{least:.2g} over the run from none."
        )
    return sentences


def _verdict(found: Paired) -> str:
    if found.verdict is None:
        return "."
    if found.verdict == NOT_RESOLVED:
        more = f"; about {found.seeds_to_resolve} seeds would" if found.seeds_to_resolve else ""
        return f". Whether it is above the tolerance of {found.tolerance:g} is not resolved{more}."
    p = found.p_not_above if found.verdict == NOT_ABOVE else found.p_above
    return f"; it is {found.verdict} of {found.tolerance:g} (one-sided t-test, p = {p:.2g})."


def _per_hundred(found: Paired) -> str:
    assert found.growth is not None
    return with_spread(100 * found.growth.mean, 100 * found.growth.half_width)


def _about_control(label: str, result: Verification) -> list[str]:
    control = result.control(label)
    if control is None:
        return []
    if not any(control.by_seed.values()):
        cause = (
            "data are paired, and the branch repeats itself bit for bit"
            if label == result.baseline
            else "it has no random numbers to differ by"
        )
        return [f"{label} against itself differs by exactly 0: {cause}."]
    if label == result.baseline and result.baseline_recipe is None:
        return [
            f"{label} against itself differs by {control.gap}, though nothing was changed: the branch is not a "
            "function of its seed, and this spread is in all gaps. Take everything random from torch or from the seed."
        ]
    return [
        f"{label} against itself, with other draws of stochastic rounding, differs by {control.gap} "
        f"(two-sided t-test, p = {control.p_value:.2g}): the spread of a gap where there is none."
    ]
