"""`QuantizerRole`: which tensor of which module a quantizer is for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a quantizer is for. Parts that are not known are empty.

    Attributes:
        module_type: "linear", "grouped_linear", or "dpa" for an attention core.
        tensor_type: "input", "weight", "grad_output", ...; for attention "qkv", "s", "o", "do", "dp" or "dqkv".
        name: name of the module, as Transformer Engine has it: the projections of attention are called
            ``layernorm_linear_qkv``, ``linear_qkv``, ``layernorm_linear_q``, ``linear_q`` and ``linear_kv``.
        path: name of the module, as it is in the model, if that is another one. Rules of recipes are for it. It has no
            part in comparisons.

    Examples:
        >>> role = cg.QuantizerRole(module_type="linear", tensor_type="weight", name="fc1")
        >>> role.tensor_type, role.layer
        ('weight', 'fc1')
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
    path: str = field(default="", compare=False, repr=False)

    @property
    def layer(self) -> str:
        """The name that rules of recipes are for."""
        return self.path or self.name

    def __str__(self) -> str:
        return "|".join(part for part in (self.module_type, self.tensor_type, self.name) if part)
