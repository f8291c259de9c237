"""Weights that are kept quantized, converted to the formats of another recipe."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..recipe import Recipe, preserved_value
from ..recipe.coerce import as_recipe
from ..tensor import QuantizedTensor
from ..tensor.sharding import local_part
from .base import Built, QuantizedModule


def requantize_(model: nn.Module, recipe: Recipe | str) -> dict[str, nn.Parameter]:
    """Quantize the weights of ``model`` that are kept quantized anew, for ``recipe``.

    They are made from what `quantized_model_init` preserved, as long as the weight still stands for it,
    else from what the weight decodes to. A weight that stays of its class stays the same parameter. One
    that does not is replaced, with its gradient and its attributes: the result names these new parameters,
    and an optimizer has to be told. Nothing has changed if any weight cannot be converted: quantized
    parameters of modules that do not build quantizers from recipes themselves are refused.
    """
    recipe = as_recipe(recipe)
    _refuse_other_modules(model)
    made: dict[int, QuantizedTensor] = {}  # by the old parameter: tied weights stay tied
    plans: list[tuple[str, QuantizedModule, Built, dict[str, QuantizedTensor]]] = []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule) and module.primary_weights_in_fp8:
            built = module._made_for(recipe)
            module._check_pairs(recipe, built.quantizers, {})
            weights = {}
            for name, weight in module._quantized_weights().items():
                if id(weight) not in made:
                    made[id(weight)] = module._quantized_parameter(_value(weight), name, built)
                weights[name] = made[id(weight)]
            plans.append((path, module, built, weights))

    parameters: dict[int, Any] = {}
    replaced: dict[str, nn.Parameter] = {}
    for path, module, built, weights in plans:
        for name, quantized in weights.items():
            old: Any = getattr(module, name)
            if type(old) is type(quantized):
                if id(quantized) not in parameters:
                    old.data = quantized
                parameters[id(quantized)] = old
                continue
            if id(quantized) not in parameters:
                parameters[id(quantized)] = _successor(old, quantized)
            setattr(module, name, parameters[id(quantized)])
            replaced[f"{path}.{name}" if path else name] = parameters[id(quantized)]
        module._adopt(built)
    return replaced


def _refuse_other_modules(model: nn.Module) -> None:
    """None is passed over in silence."""
    for path, module in model.named_modules():
        known = set(module._quantized_weights()) if isinstance(module, QuantizedModule) else set()
        for name, parameter in module.named_parameters(recurse=False):
            if local_part(parameter) is not parameter and isinstance(local_part(parameter), QuantizedTensor):
                raise NotImplementedError(f"requantize_: {path}.{name} is sharded; requantize the model before it is")
            if isinstance(parameter, QuantizedTensor) and name not in known:
                raise TypeError(
                    f"requantize_: {path}.{name} is a quantized parameter of a {type(module).__name__}, which is not "
                    "one of crossgrain's modules of linear layers"
                )


def _value(weight: QuantizedTensor) -> Tensor:
    """High precision for a weight: the preserved initial value, unless the weight was written since."""
    preserved = preserved_value(weight)
    return weight.dequantize().detach() if preserved is None else preserved.to(weight.device)


def _successor(old: Any, quantized: QuantizedTensor) -> nn.Parameter:
    new = nn.Parameter(quantized, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        if name not in old._shared_names():  # what users hung on the parameter
            setattr(new, name, value)
    new.grad = old.grad
    return new
