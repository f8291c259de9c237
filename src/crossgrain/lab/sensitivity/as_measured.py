"""Rules that let `convert` change just the layers that were measured, without ``skip`` and ``include``."""

from __future__ import annotations

import glob
from typing import Any

from ...gemm.operands import GEMMS
from ...recipe import GemmRecipe, Rule
from ...recipe.format_spec import FormatSpec
from ...recipe.layer_formats import make_settings
from ...recipe.rules import Glob
from .result import Sensitivity


def as_measured(recipe: GemmRecipe, s: Sensitivity, base: GemmRecipe | None = None) -> GemmRecipe:
    """A recipe with a rule for each layer that ``skip`` left out, and for each that only ``include`` brought in.

    Layers that were skipped stay in high precision. Layers that stay there by default, such as an output head, have to
    be named by a rule to be changed. If no rule names them, they get one that says what the base gives them.

    Args:
        recipe: the recipe.
        s: what was measured.
        base: the recipe that says what included layers have that no rule names; by default ``recipe``.
    """
    base = recipe if base is None else base
    rules = [_rule(layer, {"all": "hp"}) for layer in s.skipped]
    for layer in s.included:
        if not recipe.names_layer(layer, s.layers[layer].module_type):
            formats = _formats(base, layer, s.layers[layer].module_type)
            rules += [_rule(layer, formats)] if formats else []
    return recipe.with_rules([*recipe.rules, *rules]) if rules else recipe


def _rule(layer: str, settings: dict[str, Any]) -> Rule:
    return Rule(Glob((glob.escape(layer),)), make_settings(settings))


def _formats(base: GemmRecipe, layer: str, module_type: str) -> dict[str, Any]:
    """What the base gives a layer; nothing if that is high precision."""
    chosen = base.layer_formats(layer, module_type)
    if chosen == base.with_rules([]).layer_formats(layer, module_type):
        formats: dict[str, Any] = {gemm: getattr(base, gemm) for gemm in GEMMS}
    else:
        formats = {f"{gemm}.{tensor}": chosen.format(gemm, tensor).value for gemm in GEMMS for tensor in GEMMS[gemm]}
    return {} if all(spec == FormatSpec("hp") for spec in formats.values()) else formats
