"""Weights that are kept quantized (`quantized_model_init`): how they are made, and which quantizers they use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..quantizers.base import Quantizer
from ..recipe import Recipe
from ..runtime.collectives import same_ranks
from ..tensor import QuantizedTensor
from ..tensor.init_values import keep_high_precision_init_val
from ..tensor.sharding import follow_quantizer, is_sharded, local_part
from .module_interface import Built, ModuleInterface


class KeptWeights(ModuleInterface):
    """The part of `QuantizedModule` that is about weights which are kept quantized."""

    @property
    def primary_weights_in_fp8(self) -> bool:
        return bool(self._quantized_weights())

    def _quantized_weights(self) -> dict[str, QuantizedTensor]:
        """The weights that are kept quantized, as this rank uses them: of a tensor-parallel DTensor, its local part."""
        found = {name: self._usable(getattr(self, name, None)) for name in self.weight_names}  # there may be none yet
        return {name: weight for name, weight in found.items() if isinstance(weight, QuantizedTensor)}

    def _usable(self, weight: Any) -> Any:
        if not is_sharded(weight) or weight.device_mesh.ndim > 1:
            return weight
        of_styles = same_ranks(weight.device_mesh.get_group(), self.tp_group)
        return local_part(weight) if of_styles else weight

    def _register_weight(self, name: str, value: Tensor) -> None:
        """Register a weight, quantized if the module was made under `quantized_model_init`."""
        if self._parameter_init is None:
            self.register_parameter(name, nn.Parameter(value))
            return
        if value.is_meta:
            self.register_parameter(name, nn.Parameter(self._meta_parameter(value, name, self._parameter_init.recipe)))
            return
        built = self._build_quantizers(self._parameter_init.recipe, backward=torch.is_grad_enabled())
        parameter = nn.Parameter(self._quantized_parameter(value, name, built))
        if self._parameter_init.preserve_init_value:
            keep_high_precision_init_val(parameter, value)
        self.register_parameter(name, parameter)
        self._relink_weights(built.quantizers)

    def _quantized_parameter(
        self, value: Tensor, name: str, built: Built, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """Quantize ``value`` as the weight ``name``; its nominal dtype is ``dtype``, or that of ``value``."""
        quantizer = _without_unread_columns(self._weight_quantizers(built.quantizers)[name], built.recipe)
        with torch.no_grad(), self._naming(name):
            if dtype in (None, value.dtype):
                quantized: QuantizedTensor = quantizer.quantize(value.detach())
            else:
                quantized = quantizer.make_empty(value.shape, dtype=dtype, device=value.device)
                quantized.quantize_(value.detach())
        return quantized

    def _meta_parameter(self, value: Tensor, name: str, recipe: Recipe) -> QuantizedTensor:
        """The quantized weight ``name`` on the meta device, so that it can be sharded before it gets memory."""
        with torch.device("cpu"):  # histories and scales are needed whole, wherever the model is made
            built = self._made_for(recipe)
        quantizer = _without_unread_columns(self._weight_quantizers(built.quantizers)[name], recipe)
        with self._naming(name):
            empty: QuantizedTensor = quantizer.make_empty(value.shape, dtype=value.dtype, device=value.device)
        return empty

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.layer}: {name} cannot be kept quantized: {error}") from error

    def _weight_quantizers(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> dict[str, Quantizer]:
        """The quantizers of weights that are kept quantized, by name.

        They make planes in both directions, also under no_grad, because the model may be trained later.
        """
        made = {}
        for index, (name, by_tensor) in enumerate(self._weights_and_operands(quantizers)):
            sharing, quantizer = self._sharing_of_weight(index), by_tensor["weight"].copy()
            made[name] = quantizer = quantizer if sharing is None else sharing.quantizer("weight", quantizer)
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.internal = False
        return made

    def _relink_weights(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> None:
        """Let weights that are kept quantized use the new quantizers when they are written next. Their bytes stay.

        Their planes stay too, because a later step may need a plane that this step does not.
        """
        weights = self._quantized_weights()
        if not weights:
            return
        for name, quantizer in self._weight_quantizers(quantizers).items():
            weight = weights.get(name)
            if weight is None or type(weight._quantizer) is not type(quantizer):
                continue
            try:
                quantizer.check_writable(weight)
            except ValueError:
                continue  # another format of the same family: the weight stays what it is
            follow_quantizer(weight, quantizer)


def _without_unread_columns(quantizer: Quantizer, recipe: Recipe | None) -> Quantizer:
    """``quantizer``, which makes only rows if backward decodes these (``backward_override``) and reads no columns.

    This halves the memory of large frozen weights, such as those under LoRA adapters.
    """
    if recipe is not None and recipe.backward_override is not None:
        quantizer.set_usage(columnwise=False)
    return quantizer
