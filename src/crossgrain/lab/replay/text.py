"""A replay as a report of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...gemm.operands import GEMMS
from ..tables import aligned
from .looking import Site
from .outcome import Outcome, difference, percent
from .result import Replay
from .search import ENOUGH

_MOST_OPERANDS = 8
_MOST_PARAMETERS = 3
_MOST_GROUPS = 4
_SYMBOLS = {"input": "x", "weight": "W", "grad_output": "dy"}


def shown(result: Replay) -> str:
    """The whole report."""
    parts = [_repeated(result), *_measured(result), "", *_verdict(result)]
    if result.kinds:
        parts += ["", *_table(result)]
    return "\n".join([*parts, *_left_out(result), *result.notes])


def _repeated(result: Replay) -> str:
    text = "The step was repeated bit for bit"
    if result.expected_loss is None:
        return f"{text}."
    if result.expected_loss == result.low.loss:
        return f"{text}, and its loss is exactly that of the training run."
    return (
        f"{text}, but IT IS NOT THE STEP OF THE TRAINING RUN, whose loss was {result.expected_loss!r} and not "
        f"{result.low.loss!r}: the data, the random numbers, the recipe or the versions of libraries are others."
    )


# ---- what was measured -------------------------------------------------------------------------------------------


def _measured(result: Replay) -> list[str]:
    low, high = result.low, result.high
    rows = [["", "as it was", "high precision"], ["loss", _number(low.loss), _number(high.loss)]]
    rows.append(["gradient norm", _number(low.gradient_norm), _number(high.gradient_norm)])
    if low.loss_after is not None or high.loss_after is not None:
        rows.append(["loss after the update", _number(low.loss_after), _number(high.loss_after)])
    lines = [*aligned(rows), _gradient_text(low, high)]
    if low.error:
        lines.append(f"As it was, the step ended early: {low.error}")
    lines += _parameter_lines(result)
    if result.first_nonfinite is not None:
        site, was_there = result.first_nonfinite
        when = "before it was quantized" if was_there else "after it was quantized, and not before"
        lines.append(f"NaNs or infinities come up first in {_described([site])}, {when}.")
    return lines


def _gradient_text(low: Outcome, high: Outcome) -> str:
    if low.distance is None or not math.isfinite(low.distance) or not high.gradient_norm > 0:
        return f"The gradient cannot be compared: as it was, {low.nonfinite} numbers are NaN or infinite."
    angle = "" if low.cosine is None else f", with a cosine of {low.cosine:.4f}"
    share = percent(low.distance / high.gradient_norm)
    return f"The gradient differs from that of high precision by {share} of its norm{angle}."


def _parameter_lines(result: Replay) -> list[str]:
    differing = [(name, norms) for name, norms in result.parameters.items() if norms[2] != 0]
    if not differing:
        return []
    first = differing[:_MOST_PARAMETERS]
    names = [f"{name} ({_number(own)} instead of {_number(other)})" for name, (own, other, _) in first]
    return [f"Norms of gradients that differ most: {', '.join(names)}."]


# ---- what it means -----------------------------------------------------------------------------------------------


def _verdict(result: Replay) -> list[str]:
    measure = "NaNs and infinities" if result.measure == "nonfinite" else result.measure
    if result.verdict == "not precision":
        return [
            f"High precision has NaNs or infinities as well ({max(1, result.high.nonfinite)} numbers), so the formats "
            "of this step did not make them. Look at the batch, and at the weights: replay an earlier checkpoint."
        ]
    if result.verdict == "no difference":
        same = f"the {measure} is that of high precision, up to the order of sums in fp32"
        what = "nothing is NaN or infinite" if result.measure == "nonfinite" else same
        return [
            f"There is no difference to explain: {what}. If the step went wrong, look at the batch and at the weights: "
            "replay an earlier checkpoint."
        ]
    if result.verdict == "chance":
        return [
            f"It was chance: with other draws of stochastic rounding, {_other_draws(result)} of the difference in the "
            f"{measure} is there."
        ]
    return _culprits(result, measure) if result.culprits else _none_found(result, measure)


def _none_found(result: Replay, measure: str) -> list[str]:
    best, largest = result.operands[0] if result.operands else None, ""
    if best is not None:
        largest = f" The largest part is that of {best.layer}, {best.operand}: {percent(best.share)}."
    if result.verdict == "unfinished":
        return [f"NOT FINISHED: {_end(result)} before it was known what makes the difference.{largest}"]
    lines = [f"No few operands make the difference in the {measure}: it is the sum of many parts.{largest}"]
    kind = max(result.kinds, key=lambda kind: result.kinds[kind])
    lines.append(f"By kind, the largest part is that of {kind} in all layers: {percent(result.kinds[kind])}.")
    if result.other_draws:
        lines.append(f"With other draws of stochastic rounding, {_other_draws(result)} of the difference is there.")
    return lines


def _culprits(result: Replay, measure: str) -> list[str]:
    one = len(result.culprits) == 1
    head = "One operand makes" if one else f"{len(result.culprits)} operands together make"
    share = "the difference" if result.share >= ENOUGH else f"{percent(result.share)} of the difference"
    they_are = "it is" if one else "they are"
    lines = [f"{head} {share} in the {measure}: {_described(result.culprits)}."]
    line = f"If {they_are} in high precision, {percent(result.share)} of the difference is gone"
    if result.alone is not None:
        line += f"; if only {they_are} quantized, {percent(result.alone)} of it is there"
    lines.append(f"{line}.")
    if not result.complete:
        lines.append(f"NOT FINISHED: {_end(result)}, and other operands may make a part of it, too.")
    if result.other_draws:
        lines.append(f"It is not chance: with other draws of stochastic rounding, {_other_draws(result)} is there.")
    for site in result.culprits:
        lines.append(f"{site.layer}, {site.operand} in {result.roundings[site].format}: {result.roundings[site]}.")
    lines.append(f"In a recipe: {'; '.join(result.rules)}")
    if any(not site.operand.startswith("attention") for site in result.culprits):
        alone = "; ".join(f"{site}: hp" for site in result.culprits)
        lines.append(f"or, if the operands of a GEMM may differ (allow_mixed: true): {alone}")
    return lines


def _end(result: Replay) -> str:
    return f"{'Ctrl-C' if result.interrupted else f'the limit of {result.budget} runs'} ended the search"


def _other_draws(result: Replay) -> str:
    whole = difference(result.measure, result.low, result.high)
    left = [difference(result.measure, other, result.high) / whole for other in result.other_draws]
    return " and ".join(percent(each) for each in left)


# ---- tables ------------------------------------------------------------------------------------------------------


def _table(result: Replay) -> list[str]:
    rows = [["difference explained", "operand", "format"]]
    for one in result.operands[:_MOST_OPERANDS]:
        rows.append([percent(one.share), f"{one.layer}: {one.operand}", one.format])
    kinds = sorted(result.kinds.items(), key=lambda item: -item[1])
    rows += [[percent(share), f"all layers: {kind}", ""] for kind, share in kinds]
    alone = f"{len(result.operands)} of them raised alone"
    if len(result.operands) > _MOST_OPERANDS:
        alone += f", of which the table has {_MOST_OPERANDS}"
    return [*aligned(rows), f"{result.runs} runs; {len(result.roundings)} operands, {alone}."]


def _left_out(result: Replay) -> list[str]:
    kinds = {frozenset(site for site in result.roundings if site.operand == kind) for kind in result.kinds}
    groups = [(members, share) for members, share in result.groups if frozenset(members) not in kinds]
    lines = [f"Not one by one: {_group(members)}; together {percent(share)}." for members, share in groups]
    if len(lines) > _MOST_GROUPS:
        lines[_MOST_GROUPS:] = [f"Not one by one: {len(groups) - _MOST_GROUPS} more groups, with less."]
    reasons: dict[str, list[Site]] = {}
    for site, why in result.not_examined.items():
        reasons.setdefault(why, []).append(site)
    lines += [f"Not raised, not even in high precision: {_group(own)}: {why}." for why, own in reasons.items()]
    return lines


def _group(members: Sequence[Site]) -> str:
    first, last = members[0], members[-1]
    if len(members) == 1:
        return f"{first.layer}, {first.operand}"
    if all(site.operand == first.operand for site in members):
        return f"{first.operand} of {len(members)} layers, {first.layer} to {last.layer}"
    return f"{len(members)} operands, {first.layer}, {first.operand} to {last.layer}, {last.operand}"


def _described(sites: Sequence[Site]) -> str:
    """Operands in words, by the tensor that they are directions of."""
    tensors: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        tensors.setdefault((site.layer, site.operand.partition(".")[2]), []).append(site)
    return " and ".join(_tensor(layer, tensor, own) for (layer, tensor), own in tensors.items())


def _tensor(layer: str, tensor: str, sites: list[Site]) -> str:
    if tensor not in _SYMBOLS:
        return f"{tensor} of {layer}, {sites[0].operand}"
    directions = [GEMMS[site.operand.partition(".")[0]][tensor].value for site in sites]
    operands = " and ".join(site.operand for site in sites)
    return f"{_SYMBOLS[tensor]} of {layer}, {' and '.join(directions)}, {operands}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"
