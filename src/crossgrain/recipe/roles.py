"""`QuantizerRole`: which tensor of which module a quantizer is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a quantizer is for. Parts that are not known are empty.

    Attributes:
        module_type: "linear", "grouped_linear", or "dpa" for an attention core.
        tensor_type: "input", "weight", "grad_output", ...; for attention "qkv", "s", "o", "do", "dp" or "dqkv".
        name: name of the module.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return "|".join(part for part in (self.module_type, self.tensor_type, self.name) if part)
