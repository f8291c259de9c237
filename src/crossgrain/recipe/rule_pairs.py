"""Whether the operands of GEMMs can be multiplied, for all rules of a recipe, before a model is known.

Which rules are for the same layer is known only with a model, and a rule may complete one before it. So a rule is right
if there is something below it that it pairs with. Only the kind of each operand matters here, of which there are few.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..gemm.operands import GEMMS, PairingKind, pairing_kind
from .layer_formats import LayerFormats, Settings, make_layer_formats

Kinds = dict[tuple[str, str], PairingKind]  # by GEMM and tensor, of the operands that have a format


def unpaired_rule(default: LayerFormats, rules: Iterable[Settings], gemms: tuple[str, ...]) -> int | None:
    """The position of the first rule that pairs with nothing: not with the default, not with a rule before it on top
    of the default, and not with all rules before it. None if there is none.

    Args:
        default: the formats without rules.
        rules: what each rule sets.
        gemms: the GEMMs whose operands must pair.
    """
    below = _kinds(default, gemms)
    known: dict[Settings, Kinds | None] = {}  # rules often set the same
    before: dict[tuple[Any, ...], Kinds] = {}  # the rules before, of each kind one
    together: Kinds = {}  # all rules before, one on top of the other
    for position, settings in enumerate(rules):
        if settings not in known:
            known[settings] = _kinds_of_rule(settings, gemms)
        kinds = known[settings]
        if kinds is None or not (
            all_pair(below, kinds)
            or any(all_pair(below, other, kinds) for other in before.values())
            or all_pair(below, together, kinds)
        ):
            return position
        before.setdefault(tuple(kinds.items()), kinds)
        together.update(kinds)
    return None


def all_pair(*stages: Kinds) -> bool:
    """Whether the operands of every GEMM can be multiplied, if each stage replaces what it has in those before it."""
    kinds = {place: kind for stage in stages for place, kind in stage.items()}
    by_gemm: dict[str, PairingKind] = {}
    return all(by_gemm.setdefault(gemm, kind) == kind for (gemm, _), kind in kinds.items())


def _kinds(formats: LayerFormats, gemms: tuple[str, ...]) -> Kinds:
    return {
        (gemm, tensor): pairing_kind(choice.value.stored_format(GEMMS[gemm][tensor]))
        for (gemm, tensor), choice in formats.formats
        if gemm in gemms
    }


def _kinds_of_rule(settings: Settings, gemms: tuple[str, ...]) -> Kinds | None:
    try:
        return _kinds(make_layer_formats((("rule", settings),)), gemms)
    except ValueError:  # options of one format exclude each other
        return None
