"""`OwnForward`: an adapter for modules that call ``F.linear`` with their own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..recipe.projections import LayerAdapter, Multiply, Projection


class OwnForward(LayerAdapter):
    """Runs the forward of the module's own class, in which ``F.linear`` with its weights is replaced.

        crossgrain.register_layer(MyLinear, crossgrain.OwnForward("weight"))

    The bias, if there is one, stays an argument of ``F.linear`` and is added in high precision.

    Args:
        *weights: names of the parameters that the module passes to ``F.linear``. A layer with a single weight
            ``weight`` has the name of its module in recipes; others have the names of their parameters.

    Examples:
        >>> class Doubled(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * torch.nn.functional.linear(x, self.weight, self.bias)
        >>> cg.register_layer(Doubled, cg.OwnForward("weight"))
        >>> cg.convert(torch.nn.Sequential(Doubled(32, 32)), "mxfp8").converted
        ['0']
    """

    def __init__(self, *weights: str) -> None:
        if not weights:
            raise ValueError("OwnForward needs the names of the weights, such as OwnForward('weight')")
        self.weights = weights

    def projections(self, module: nn.Module) -> Sequence[Projection]:
        if self.weights == ("weight",):
            return [Projection("", "weight")]
        return [Projection(name, name) for name in self.weights]

    def why_not(self, module: nn.Module) -> str | None:
        for name in self.weights:
            weight = getattr(module, name, None)
            if not isinstance(weight, Tensor) or weight.dim() != 2:
                return f"{name} of a {type(module).__name__} is not a parameter [out, in]"
        return None

    def forward(self, module: Any, multiply: Multiply, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's class.

        Raises:
            RuntimeError: it did not call ``F.linear`` with all weights, so some products were not in the formats of the
                recipe.
        """
        weights = {id(projection.parameter(module)): projection.name for projection in self.projections(module)}
        with _Replacing(weights, multiply) as replacing:
            result = module._was[0].forward(module, *args, **kwargs)
        missing = set(weights.values()) - replacing.seen
        if missing:
            raise RuntimeError(
                f"{module.layer}: forward of {module._was[0].__name__} did not call torch.nn.functional.linear with "
                f"its parameter {sorted(missing)[0] or 'weight'!r} itself, so this product was not in the formats of "
                "the recipe. Register a LayerAdapter of your own for it, or leave the layer out with skip"
            )
        return result


class _Replacing(TorchFunctionMode):
    """Replaces calls of ``F.linear`` with some weights, which are known by their ids."""

    def __init__(self, weights: dict[int, str], multiply: Multiply) -> None:
        super().__init__()
        self._weights = weights
        self._multiply = multiply
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear:
            return func(*args, **kwargs)
        x, weight, bias = (
            *args,
            *(kwargs[name] for name in ("input", "weight", "bias")[len(args) :] if name in kwargs),
            None,
        )[:3]
        name = self._weights.get(id(weight))
        if name is None:
            return func(*args, **kwargs)
        self.seen.add(name)
        y = self._multiply(name, x)
        return y if bias is None else y + bias.to(y.dtype)
