"""`WhatIf`: the formats that another recipe would give the tensors of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...formats.encoding import Encoding
from ...gemm.operands import TENSORS
from ...planes import COLUMNWISE, ROWWISE, Direction
from ...quantizers.hybrid import HybridQuantizer
from ...recipe import GemmRecipe
from ...recipe.format_spec import FormatSpec
from ...recipe.syntax import RecipeSyntaxError


@dataclass(frozen=True)
class Alternative:
    """What a tensor would be encoded as in one direction.

    Attributes:
        encoding: the encoding.
        rows: the encoding of the rows from which the columnwise plane would be made; None if it would be made from the
            tensor itself.
    """

    encoding: Encoding
    rows: Encoding | None = None


class WhatIf:
    """A recipe that is not in use.

    Args:
        text: a format with options, such as "nvfp4(rht, sr)", which means ``all: nvfp4(rht, sr)``: options apply to the
            operands that they are meant for; or a recipe: the name of a preset or one line of text. "mxfp8" and "nvfp4"
            are formats here.

    Attributes:
        label: the text.
        recipe: the recipe.

    Raises:
        ValueError: it is neither, or it needs histories of amaxes, which a format that is not in use does not have.
    """

    def __init__(self, text: str) -> None:
        self.label = text
        self.recipe = _recipe(text)
        if self.recipe.may_keep_histories():
            raise ValueError(
                f"what_if {text!r}: delayed scaling takes its scales from the steps before, which a format that is not "
                "in use does not have. Use current scaling, such as fp8"
            )
        self._known: dict[tuple[str, str, str], dict[Direction, Alternative] | None] = {}

    def alternatives(self, layer: str, tensor: str, module_type: str) -> dict[Direction, Alternative] | None:
        """What the tensor of a layer would be encoded as; None for tensors that are no operands of a linear layer."""
        key = (layer, tensor, module_type)
        if key not in self._known:
            self._known[key] = self._found(layer, tensor, module_type) if tensor in TENSORS else None
        return self._known[key]

    def _found(self, layer: str, tensor: str, module_type: str) -> dict[Direction, Alternative]:
        quantizer: Any = self.recipe.layer_formats(layer, module_type).quantizer(tensor)
        if not isinstance(quantizer, HybridQuantizer):
            return {direction: Alternative(quantizer.encoding(direction)) for direction in Direction}
        row, column = (quantizer.encoding(direction) for direction in (ROWWISE, COLUMNWISE))
        return {ROWWISE: Alternative(row), COLUMNWISE: Alternative(column, row if quantizer.derives_columns else None)}


def _recipe(text: str) -> GemmRecipe:
    try:
        spec = FormatSpec.parse(text)
    except RecipeSyntaxError:
        return GemmRecipe.load(text)
    return GemmRecipe.load({"all": str(spec)})
