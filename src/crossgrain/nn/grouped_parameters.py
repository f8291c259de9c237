"""The parameters of a linear layer for each group of rows, of modules and of operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..quantizers.base import Quantizer
from ..quantizers.groups_alike import validate_grouped_quantizer_list
from ..recipe import Recipe
from ..tensor import QuantizedTensor
from .module_interface import ModuleInterface


class GroupedParameters(ModuleInterface):
    """Base class of layers with weights ``weight0``, ``weight1``, ... [out, in], or one ``weight`` [groups, out, in].

    Biases are likewise ``bias0``, ``bias1``, ... [out], or one ``bias`` [groups, out].

    Attributes:
        in_features: columns of each weight.
        out_features: rows of each weight.
        single_grouped_weight: there is one weight for all groups.
        single_grouped_bias: there is one bias for all groups.
    """

    in_features: int
    out_features: int
    single_grouped_weight: bool
    single_grouped_bias: bool

    @property
    def _groups(self) -> int:
        """The number of groups."""
        raise NotImplementedError

    @property
    def _biased(self) -> bool:
        """Whether there are biases."""
        raise NotImplementedError

    @property
    def weight_names(self) -> list[str]:
        return ["weight"] if self.single_grouped_weight else [f"weight{g}" for g in range(self._groups)]

    @property
    def bias_names(self) -> list[str]:
        if not self._biased:
            return []
        return ["bias"] if self.single_grouped_bias else [f"bias{g}" for g in range(self._groups)]

    def _named(self, name: str) -> Tensor:
        """The parameter ``name``."""
        parameter: Tensor = getattr(self, name)
        return parameter

    def _group_weights(self) -> list[Tensor]:
        """The weight of each group; parts of the single parameter with ``single_grouped_weight``."""
        if not self.single_grouped_weight:
            return [self._named(name) for name in self.weight_names]
        weight, rows = self._named("weight"), self.out_features
        if not isinstance(weight, QuantizedTensor):
            return list(weight.detach().unbind(0))
        flat = weight._viewed((self._groups * rows, self.in_features))
        return [flat._sliced(0, g * rows, (g + 1) * rows) for g in range(self._groups)]

    def _group_biases(self) -> list[Tensor] | list[None]:
        """The bias of each group; parts of the single parameter with ``single_grouped_bias``."""
        if not self._biased:
            return [None] * self._groups
        if self.single_grouped_bias:
            return list(self._named("bias").detach().unbind(0))
        return [self._named(name) for name in self.bias_names]

    def _check_groups_alike(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> None:
        """Raise if a custom recipe gives a tensor other quantizers in one group than in the others."""
        if not recipe.custom():
            return
        groups = self._gemm_operands(quantizers)
        for tensor in ("input", "weight", "grad_output"):
            operand = f"{self.layer}: {tensor}"
            validate_grouped_quantizer_list([group[tensor] for group in groups], operand_name=operand)
