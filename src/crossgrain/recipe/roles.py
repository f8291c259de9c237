"""Which tensor of which module a quantizer is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizerRole:
    """``module_type`` ("linear", "grouped_linear", "dpa"), ``tensor_type`` ("input", "weight",
    "grad_output", ...), ``name`` of the module. Unknown parts are empty."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return "|".join(part for part in (self.module_type, self.tensor_type, self.name) if part)
