"""What a report shows, as compact plain data: `report.js` reads nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...gemm.operands import GEMMS
from ..sensitivity import Effect, Sensitivity, Site
from ..verify import Verification
from ..verify.claims import MAY_NOT, claims
from ..verify.text import growth_text, verdict_text
from .choices import BASE, Meaning, code_of
from .distributions import Distribution
from .numbers import Pieces, short, thinned, triple, without_none

QUANTITIES = {gemm: ("loss",) if gemm == "fprop" else ("noise", "bias") for gemm in GEMMS}
_MOST_STEPS = 200  # points of a curve

PREDICTED = (
    "Which GEMM costs how much: the rise of the loss if one fprop GEMM alone goes to a format, measured on {batches} "
    "of data at this checkpoint, with 95 % intervals.",
    "How much noise and bias a format adds to the gradient in dgrad and wgrad, as a share of the variance that the "
    "choice of the batch gives it.",
)
NOT_PREDICTED = (
    "That a predicted gap is the gap of a training run: it is a sum over GEMMs, each measured alone. Only "
    "paired runs show the gap.",
    "That noise or bias of gradients are nats. They are not added to the loss unless a paired run has shown what they "
    "are worth.",
    "Time that was measured: savings come from published rates of a device, as if these were reached.",
)


def report_data(
    sensitivity: Sensitivity,
    frontier: Sequence[Any] | None,
    found: Any | None,
    verification: Verification | None,
    distributions: Iterable[Distribution | Mapping[str, Any]] | None,
    title: str,
) -> dict[str, Any]:
    """Collect everything that the page shows.

    Raises:
        ValueError: a frontier, a recipe or a distribution is about layers or candidates that were not measured.
    """
    pieces = Pieces()
    points = _points(sensitivity, [*(frontier or ()), *([] if found is None else [found])])
    chosen = None if found is None else points.pop()
    points.sort(key=lambda point: point["saving"])
    if chosen is not None and chosen["recipe"] not in [point["recipe"] for point in points]:
        points = sorted([*points, chosen], key=lambda point: point["saving"])
    at = None if chosen is None else [point["recipe"] for point in points].index(chosen["recipe"])
    may, may_not = _claims(sensitivity, verification)
    return without_none(
        {
            "title": title,
            **_measured(sensitivity),
            "points": [{**point, "recipe": pieces.numbers_of(point["recipe"])} for point in points],
            "found": at,
            "verified": None if verification is None else _verified(verification, points, sensitivity, pieces),
            "distributions": _distributions(sensitivity, distributions),
            "pieces": pieces.all,
            "may": may,
            "may_not": may_not,
        }
    )


def _measured(sensitivity: Sensitivity) -> dict[str, Any]:
    everything = sensitivity.to_dict()
    labels = list(sensitivity.candidates)
    return {
        "base": sensitivity.base,
        "batches": sensitivity.batches,
        "loss": short(sensitivity.loss),
        "calibration": {gemm: short(value) for gemm, value in sensitivity.calibration.items()},
        "left_out": sensitivity.left_out,
        "notes": everything.get("notes", []),
        "interrupted": sensitivity.interrupted,
        "gemms": list(GEMMS),
        "candidates": [{"label": label, "formats": sensitivity.candidates[label]} for label in labels],
        "layers": [
            [name, info.module_type, info.inputs, info.outputs, info.tokens, info.experts]
            for name, info in sensitivity.layers.items()
        ],
        "effects": [
            {
                f"{gemm}.{quantity}": [
                    triple(_quantity(sensitivity, Site(layer, gemm), label, quantity)) for layer in sensitivity.layers
                ]
                for gemm in GEMMS
                for quantity in QUANTITIES[gemm]
            }
            for label in labels
        ],
    }


def _quantity(sensitivity: Sensitivity, site: Site, label: str, quantity: str) -> Any:
    return getattr(sensitivity.effects.get(site, {}).get(label, Effect()), quantity)


# ---- points of the frontier ------------------------------------------------------------------------------------------


def _points(sensitivity: Sensitivity, given: Sequence[Any]) -> list[dict[str, Any]]:
    return [_point(sensitivity, point) for point in given]


def _point(sensitivity: Sensitivity, point: Any) -> dict[str, Any]:
    names = ("saving", "predicted", "recipe", "chosen")
    fields: Mapping[str, Any] = (
        point if isinstance(point, Mapping) else {name: getattr(point, name, None) for name in names}
    )
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise ValueError(
            f"a point of the frontier needs saving, predicted, recipe and chosen; there is no {missing[0]}"
        )
    return {
        "saving": short(fields["saving"]),
        "predicted": triple(fields["predicted"]),
        "recipe": str(fields["recipe"]),
        "chosen": code_of(sensitivity, fields["chosen"]),
    }


# ---- verified recipes ------------------------------------------------------------------------------------------------


def _verified(
    verification: Verification, points: Sequence[Mapping[str, Any]], sensitivity: Sensitivity, pieces: Pieces
) -> dict[str, Any]:
    meaning, base = Meaning(sensitivity), BASE * len(sensitivity.layers) * len(GEMMS)
    places = {point["chosen"]: number for number, point in reversed(list(enumerate(points)))}
    rows = []
    for row in verification.rows():
        text = verification.baseline_recipe if row.label == verification.baseline else verification.recipes[row.label]
        found, code = row.paired, None if text is None else meaning.code_of(text)
        place = None if code is None else places.get(code)
        rows.append(
            without_none(
                {
                    "label": row.label,
                    "recipe": None if text is None else pieces.numbers_of(text),
                    "point": place,
                    "saving": points[place]["saving"] if place is not None else 0 if code == base else None,
                    "loss": None if row.diverged else short(row.loss),
                    "gap": None if found is None else triple(found.gap),
                    "seeds": None if found is None else [short(gap) for gap in found.by_seed.values()],
                    "p": None if found is None else short(found.p_value),
                    "growth": None if found is None or found.growth is None else growth_text(found),
                    "grows": None if found is None else found.grows,
                    "verdict": verdict_text(row.verdict, found) or None,
                    "diverged": row.diverged or None,
                    "curve": None if found is None else _curve(verification, row.label),
                }
            )
        )
    return without_none(
        {
            "baseline": verification.baseline,
            "steps": verification.steps,
            "last": verification.last,
            "seeds": len(verification.seeds),
            "tolerance": short(verification.tolerance),
            "interrupted": verification.interrupted,
            "rows": rows,
            "at": [step + 1 for step in thinned(verification.steps, _MOST_STEPS)],
        }
    )


def _curve(verification: Verification, label: str) -> list[Any]:
    points = verification.curve(label)
    return [triple(points[step]) for step in thinned(len(points), _MOST_STEPS)]


# ---- the rest --------------------------------------------------------------------------------------------------------


def _distributions(
    sensitivity: Sensitivity, distributions: Iterable[Distribution | Mapping[str, Any]] | None
) -> list[dict[str, Any]] | None:
    if distributions is None:
        return None
    numbers = {layer: number for number, layer in enumerate(sensitivity.layers)}
    found = [Distribution.of(one) for one in distributions]
    for one in found:
        if one.layer not in numbers:
            raise ValueError(f"there is a distribution of {one.layer}, which is not a layer that was measured")
    return [one.to_data(numbers) for one in found]


def _claims(sensitivity: Sensitivity, verification: Verification | None) -> tuple[list[str], list[str]]:
    count = sensitivity.batches
    batches = f"{count} batch{'es' * (count != 1)}"
    may, may_not = [sentence.format(batches=batches) for sentence in PREDICTED], list(NOT_PREDICTED)
    if verification is None:
        return may, [*may_not, "Anything about training: no paired runs are in this report.", *MAY_NOT[:2]]
    verified, not_verified = claims(verification)
    return [*may, *verified], [*may_not, *not_verified]
