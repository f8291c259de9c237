"""Which candidate each GEMM of each layer has: as one text for a point of a frontier, and for any recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...gemm.operands import GEMMS
from ...planes import COLUMNWISE
from ...recipe import GemmRecipe
from ..sensitivity import Sensitivity, Site

BASE = "."


def code_of(sensitivity: Sensitivity, chosen: Mapping[Any, str]) -> str:
    """One character for each GEMM of each layer: "." for the base, else "a", "b", ... for the candidates.

    Args:
        sensitivity: what was measured.
        chosen: labels of candidates by site, or by the number of the site.

    Raises:
        ValueError: a site or a candidate was not measured.
    """
    labels = list(sensitivity.candidates)
    sites = [Site(layer, gemm) for layer in sensitivity.layers for gemm in GEMMS]
    places = {site: number for number, site in enumerate(sites)}
    found = [BASE] * len(sites)
    for site, label in chosen.items():
        number = site if isinstance(site, int) else places.get(Site(*site), -1)
        if not 0 <= number < len(found) or label not in labels:
            raise ValueError(f"a point of the frontier chooses {label!r} for {site}, which was not measured")
        if label != sensitivity.base:
            found[number] = _letter(labels.index(label))
    return "".join(found)


class Meaning:
    """Finds the code of recipes by the formats that they give to layers, however they are written."""

    def __init__(self, sensitivity: Sensitivity) -> None:
        self._layers = {layer: info.module_type for layer, info in sensitivity.layers.items()}
        candidates = {
            _letter(number): GemmRecipe.load(dict(formats))
            for number, (label, formats) in enumerate(sensitivity.candidates.items())
            if label != sensitivity.base
        }
        self._recipes = {BASE: GemmRecipe.load(sensitivity.base), **candidates}
        self._formats: dict[tuple[str, str], dict[Any, str]] = {}  # for each layer and GEMM, letters by formats
        for layer, kind in self._layers.items():
            for gemm in GEMMS:
                known = self._formats[layer, gemm] = {}
                for letter, recipe in self._recipes.items():
                    known.setdefault(_formats(recipe, layer, kind, gemm), letter)

    def code_of(self, text: str) -> str | None:
        """The code of a recipe; None if a site is neither in the base nor in a candidate, or if it changes by steps."""
        try:
            recipe = GemmRecipe.load(text)
            letters = [
                self._formats[layer, gemm].get(_formats(recipe, layer, kind, gemm))
                for layer, kind in self._layers.items()
                for gemm in GEMMS
            ]
        except ValueError:  # phases, or rules about blocks that are not known here
            return None
        known = [letter for letter in letters if letter is not None]
        return "".join(known) if len(known) == len(letters) else None


def _letter(number: int) -> str:
    return chr(ord("a") + number)


def _formats(recipe: GemmRecipe, layer: str, kind: str, gemm: str) -> tuple[Any, ...]:
    formats = recipe.layer_formats(layer, kind)
    return tuple(
        (formats.format(gemm, tensor).value, formats.source(tensor).value if direction is COLUMNWISE else None)
        for tensor, direction in GEMMS[gemm].items()
    )
