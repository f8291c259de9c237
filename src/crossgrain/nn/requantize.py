"""`requantize_`: convert weights that are kept quantized to the formats of another recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..recipe import Recipe
from ..recipe.coerce import as_recipe
from ..tensor import QuantizedTensor
from ..tensor.init_values import preserved_value
from ..tensor.sharding import is_sharded, local_part
from .base import QuantizedModule
from .module_interface import Built


def requantize_(
    model: nn.Module, recipe: Recipe | str, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, nn.Parameter]:
    """Convert the weights of a model that are kept quantized to the formats of ``recipe``.

    A new weight is made from the master of the optimizer; or from the initial value that `quantized_model_init`
    preserved, if the weight was not written since; otherwise from the decoded weight. It has the dtype of the old one.

    If the class of tensor stays the same, the parameter stays the same object. Otherwise a new parameter replaces it in
    the model, with its gradient and attributes, and in ``optimizer``, with its state. An optimizer of crossgrain that
    was not passed here raises an error at its next step.

    Args:
        model: the model to change.
        recipe: the new recipe.
        optimizer: the optimizer of the model.

    Returns:
        The parameters that were replaced, by path.

    Raises:
        TypeError: a quantized parameter belongs to a module that is not crossgrain's.
        NotImplementedError: a parameter is sharded.
        ValueError: a weight cannot be quantized in the new format. In all these cases nothing has changed.

    Examples:
        >>> with cg.quantized_model_init(recipe="mxfp8"):
        ...     model = torch.nn.Sequential(cg.Linear(32, 32))
        >>> list(cg.requantize_(model, "nvfp4"))
        ['0.weight']
        >>> type(model[0].weight)
        <class 'crossgrain.quantizers.nvfp4.NVFP4Tensor'>
    """
    recipe = as_recipe(recipe)
    _refuse_other_modules(model)
    made: dict[int, QuantizedTensor] = {}  # by the old parameter: tied weights stay tied
    pending: list[tuple[str, QuantizedModule, Built, dict[str, QuantizedTensor]]] = []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule) and module.primary_weights_in_fp8:
            built = module._made_for(recipe)
            module._check_pairs(recipe, built.quantizers, {})
            weights = {}
            for name, weight in module._quantized_weights().items():
                if id(weight) not in made:
                    made[id(weight)] = module._quantized_parameter(_value(weight, optimizer), name, built, weight.dtype)
                weights[name] = made[id(weight)]
            pending.append((path, module, built, weights))

    parameters: dict[int, Any] = {}
    replaced: dict[str, nn.Parameter] = {}
    for path, module, built, weights in pending:
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
    """Raise if a quantized parameter could not be converted, so that none is left out silently."""
    for path, module in model.named_modules():
        known = set(module._quantized_weights()) if isinstance(module, QuantizedModule) else set()
        for name, parameter in module.named_parameters(recurse=False):
            if is_sharded(parameter) and isinstance(local_part(parameter), QuantizedTensor):
                raise NotImplementedError(
                    f"requantize_: {path}.{name} is sharded; call requantize_ before sharding the model"
                )
            if isinstance(parameter, QuantizedTensor) and name not in known:
                raise TypeError(
                    f"requantize_: {path}.{name} is a quantized parameter of a {type(module).__name__}; only those of "
                    "crossgrain's own modules of linear layers can be requantized"
                )


def _value(weight: QuantizedTensor, optimizer: Any) -> Tensor:
    """The high-precision value of a weight: its master, else its preserved initial value, else the decoded weight."""
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
    """Replace ``old`` by ``new`` in an optimizer, and move its state."""
    for group in optimizer.param_groups:
        group["params"][:] = [new if param is old else param for param in group["params"]]
    for by_parameter in (optimizer.state, getattr(optimizer, "_scales", {})):
        if old in by_parameter:
            by_parameter[new] = by_parameter.pop(old)
