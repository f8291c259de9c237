"""Weights that are kept quantized, converted to the formats of another recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..recipe import Recipe
from ..recipe.coerce import as_recipe
from ..tensor import QuantizedTensor
from ..tensor.init_values import preserved_value
from ..tensor.sharding import is_sharded, local_part
from .base import Built, QuantizedModule


def requantize_(
    model: nn.Module, recipe: Recipe | str, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, nn.Parameter]:
    """Quantize the weights of ``model`` that are kept quantized anew, for ``recipe``.

    They are made from the masters of ``optimizer``, or from what `quantized_model_init` preserved, as long
    as the weight still stands for it, else from what the weight decodes to. A weight that stays of its class
    stays the same parameter. One that does not is replaced, with its gradient and its attributes, and in the
    ``optimizer``, with its state; the result names these new parameters. An optimizer of crossgrain that was
    not given raises at its next step. Nothing has changed if any weight cannot be converted: quantized
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
                    made[id(weight)] = module._quantized_parameter(_value(weight, optimizer), name, built)
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
                parameters[id(quantized)] = new = _successor(old, quantized)
                if optimizer is not None:
                    _hand_over(optimizer, old, new)
            setattr(module, name, parameters[id(quantized)])
            replaced[f"{path}.{name}" if path else name] = parameters[id(quantized)]
        module._adopt(built)
    return replaced


def _refuse_other_modules(model: nn.Module) -> None:
    """None is passed over in silence."""
    for path, module in model.named_modules():
        known = set(module._quantized_weights()) if isinstance(module, QuantizedModule) else set()
        for name, parameter in module.named_parameters(recurse=False):
            if is_sharded(parameter) and isinstance(local_part(parameter), QuantizedTensor):
                raise NotImplementedError(f"requantize_: {path}.{name} is sharded; requantize the model before it is")
            if isinstance(parameter, QuantizedTensor) and name not in known:
                raise TypeError(
                    f"requantize_: {path}.{name} is a quantized parameter of a {type(module).__name__}, which is not "
                    "one of crossgrain's modules of linear layers"
                )


def _value(weight: QuantizedTensor, optimizer: Any) -> Tensor:
    """High precision for a weight: its master, or the preserved initial value, unless the weight was written since."""
    if optimizer is not None and "master_param" in optimizer.state.get(weight, {}):
        unscaled = getattr(optimizer, "get_unscaled_state", None)  # masters may be stored in fewer bits
        master: Tensor = unscaled(weight, "master_param") if unscaled else optimizer.state[weight]["master_param"]
        return master.view(weight.shape)
    preserved = preserved_value(weight)
    return weight.dequantize().detach() if preserved is None else preserved.to(weight.device)


def _successor(old: Any, quantized: QuantizedTensor) -> nn.Parameter:
    new = nn.Parameter(quantized, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        if name not in old._shared_names():  # what users hung on the parameter
            setattr(new, name, value)
    new.grad, old.grad = old.grad, None
    old.was_replaced = True  # an optimizer that still has it must not train it in the place of its successor
    return new


def _hand_over(optimizer: Any, old: Tensor, new: nn.Parameter) -> None:
    """Put ``new`` where ``old`` is, and everything that is known about it."""
    for group in optimizer.param_groups:
        group["params"][:] = [new if param is old else param for param in group["params"]]
    for by_parameter in (optimizer.state, getattr(optimizer, "_scales", {})):
        if old in by_parameter:
            by_parameter[new] = by_parameter.pop(old)
