"""What is measured: the base and the candidates, as formats of the three GEMMs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...gemm.operands import GEMMS, TENSORS
from ...planes import Direction
from ...quantizers.base import Quantizer
from ...recipe import GemmRecipe
from ...recipe.format_spec import FormatSpec
from ...recipe.layer_formats import LayerFormats, gemms_of
from ...recipe.syntax import RecipeSyntaxError


@dataclass(frozen=True)
class Candidate:
    """A recipe that is measured at all sites, under the label that results show.

    Attributes:
        label: the text that the user gave.
        recipe: what it means. Only the base has rules.
    """

    label: str
    recipe: GemmRecipe

    @property
    def formats(self) -> dict[str, str]:
        """The format of each GEMM, as it is written in a recipe."""
        return {gemm: str(getattr(self.recipe, gemm)) for gemm in GEMMS}

    def layer_formats(self, layer: str, module_type: str) -> LayerFormats:
        """The formats of one layer."""
        return self.recipe.layer_formats(layer, module_type)

    def quantizers(self, layer: str, module_type: str) -> dict[str, Quantizer]:
        """New quantizers of one layer, by tensor.

        Raises:
            ValueError: a format has delayed scaling, whose scales follow from a history that a measurement has not.
        """
        formats = self.layer_formats(layer, module_type)
        made = {}
        for tensor in TENSORS:
            quantizer = formats.quantizer(tensor)
            if not isinstance(quantizer, Quantizer) or any(
                not isinstance(plain, Quantizer) for plain in quantizer.plain_quantizers()
            ):
                raise ValueError(
                    f"{self.label!r} gives the {tensor} of {layer} delayed scaling, whose scales follow from earlier "
                    "steps, so it cannot be measured at one checkpoint. Use current scaling instead: fp8"
                )
            made[tensor] = quantizer
        return made

    def quantizes(self, layer: str, module_type: str, gemm: str) -> bool:
        """Whether a GEMM of a layer has an operand that is not in high precision."""
        formats = self.layer_formats(layer, module_type)
        return any(not _is_plain(formats, gemm, tensor) for tensor in GEMMS[gemm])


def _is_plain(formats: LayerFormats, gemm: str, tensor: str) -> bool:
    """Whether an operand is the tensor itself: in high precision, and not made from rounded rows."""
    spec: FormatSpec = formats.format(gemm, tensor).value
    from_rows = GEMMS[gemm][tensor] is Direction.COLUMNWISE and formats.source(tensor).value != "original"
    return spec == FormatSpec("hp") and not from_rows


def base_of(base: str | GemmRecipe) -> Candidate:
    """The base as a candidate.

    Raises:
        ValueError: it is not a recipe, or has ``backward_override``.
    """
    recipe = GemmRecipe.load(base)
    if recipe.backward_override is not None:
        raise ValueError(
            f"the base has backward_override={recipe.backward_override!r}, with which its backward GEMMs are not those "
            "of its formats. Write 'dgrad: hp, wgrad: hp' instead"
        )
    return Candidate(base if isinstance(base, str) else str(base), recipe)


def candidates_of(texts: Iterable[str]) -> list[Candidate]:
    """Candidates of formats like ``nvfp4(rht, sr)``, or of recipes that say a format for each GEMM.

    A name that is a format and a preset, such as ``nvfp4``, means the format.

    Raises:
        ValueError: a text is neither, a recipe has more than formats of GEMMs, or a text comes twice.
    """
    found: list[Candidate] = []
    for text in texts:
        if any(text == candidate.label for candidate in found):
            raise ValueError(f"the candidate {text!r} is given twice")
        found.append(Candidate(text, _recipe_of(text)))
    if not found:
        raise ValueError("there is no candidate to measure: pass formats, such as candidates=['nvfp4(rht, sr)']")
    return found


def _recipe_of(text: str) -> GemmRecipe:
    try:
        formats: dict[str, Any] = dict(gemms_of(FormatSpec.parse(text)))
        return GemmRecipe(**formats)
    except RecipeSyntaxError as error:
        if ":" not in text and "-" not in text:
            raise ValueError(f"the candidate {text!r} is not a format: {error}") from error
    recipe = GemmRecipe.load(text)
    more = [key for key, _ in recipe.settings if key not in GEMMS]
    if recipe.rules or recipe.set_options or more:
        what = more[0] if more else "a rule" if recipe.rules else next(iter(recipe.set_options))
        raise ValueError(
            f"the candidate {text!r} has {what}, but a candidate says one format for each GEMM and nothing else, "
            "because a search chooses each GEMM of each layer by itself"
        )
    return recipe
