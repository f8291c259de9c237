"""Change the class of a linear layer or norm of torch or Hugging Face to crossgrain's, and back.

Only the class changes. The layer stays the same object with the same parameters and hooks, so everything that refers to
it (a parent, an optimizer, a tied embedding) refers to the quantized layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from ..nn.linear import Linear
from ..nn.norm import LayerNorm, RMSNorm
from ..recipe import quantized_model_init
from ..recipe.binding import is_conv1d
from ..tensor.sharding import is_sharded, local_part, own_part
from .uncalled import forget

_OF_EVERY_MODULE = vars(nn.Module()).keys()


class ConvertedLinear(Linear, nn.Linear):
    """An ``nn.Linear`` that `crossgrain.convert` has changed; ``isinstance(layer, nn.Linear)`` is still True."""

    def __init__(self) -> None:
        raise TypeError(
            "ConvertedLinear is what crossgrain.convert makes from an nn.Linear and cannot be created directly; use "
            "crossgrain.Linear"
        )

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize as ``nn.Linear`` does. If the layer is sharded, every rank draws the whole and keeps its part."""
        if defer_init:
            return
        self.clear_weight_cache()
        if not is_sharded(self.weight):
            nn.Linear.reset_parameters(self)
            return
        options: Any = {"device": self.weight.device, "dtype": self.weight.dtype}
        rows, columns = self.weight.shape  # of the whole: features are those of the rank
        for name, value in nn.Linear(columns, rows, bias=self.bias is not None, **options).named_parameters():
            own: Any = getattr(self, name)
            local_part(own).copy_(own_part(value, own.device_mesh, own.placements))


class ConvertedConv1D(Linear):
    """A Hugging Face ``Conv1D`` that `crossgrain.convert` has changed: ``y = x · W + b``. W is still [in, out]."""

    weight: Tensor

    def __init__(self) -> None:
        raise TypeError(
            "ConvertedConv1D is what crossgrain.convert makes from a Hugging Face Conv1D and cannot be created directly"
        )

    def _weight(self, weights: Sequence[Tensor]) -> Tensor:
        return weights[0].t()

    def reset_parameters(self, defer_init: bool = False) -> None:
        raise NotImplementedError(f"{self.layer}: a Conv1D has no reset_parameters; its model initializes it")


class ConvertedLayerNorm(LayerNorm, nn.LayerNorm):  # type: ignore[misc]
    """An ``nn.LayerNorm`` that `crossgrain.convert` has changed."""

    def __init__(self) -> None:
        raise TypeError(
            "ConvertedLayerNorm is what crossgrain.convert makes from an nn.LayerNorm and cannot be created directly; "
            "use crossgrain.LayerNorm"
        )


class ConvertedRMSNorm(RMSNorm, nn.RMSNorm):  # type: ignore[misc]
    """An ``nn.RMSNorm`` that `crossgrain.convert` has changed."""

    def __init__(self) -> None:
        raise TypeError(
            "ConvertedRMSNorm is what crossgrain.convert makes from an nn.RMSNorm and cannot be created directly; use "
            "crossgrain.RMSNorm"
        )


Converted = ConvertedLinear | ConvertedConv1D
ConvertedNorm = ConvertedLayerNorm | ConvertedRMSNorm


def class_for(module: nn.Module) -> type[Converted] | None:
    """The class that `become_quantized` gives a module; None if it is not exactly an nn.Linear or Conv1D."""
    if type(module) in (nn.Linear, NonDynamicallyQuantizableLinear):  # the latter: out_proj of torch's attention
        return ConvertedLinear
    return ConvertedConv1D if is_conv1d(module) else None


def become_quantized(module: Any) -> None:
    """Change the class of an ``nn.Linear`` or ``Conv1D``, and add the attributes of a `Linear` except parameters."""
    cls = class_for(module)
    assert cls is not None
    out_features, in_features = module.weight.shape if cls is ConvertedLinear else module.weight.t().shape
    with quantized_model_init(enabled=False):
        new = Linear(in_features, out_features, bias=module.bias is not None, device=torch.device("meta"))
    own = {key: value for key, value in vars(new).items() if key not in _OF_EVERY_MODULE}
    own["_was"] = (type(module), tuple(own.keys() - vars(module).keys()))
    vars(module).update(own)
    module.__class__ = cls


def become_plain(module: Any) -> None:
    """Undo `become_quantized`. Histories of delayed scaling are lost."""
    cls, added = module._was
    forget(module)
    for key in (*added, "_was", "bound_recipe", "_ran_plain"):
        vars(module).pop(key, None)
    if is_parametrized(module):  # torch made a subclass of the converted class, which computes the parameters
        members = {key: value for key, value in vars(type(module)).items() if key not in ("__dict__", "__weakref__")}
        cls = type(f"Parametrized{cls.__name__}", (cls,), members)
    module.__class__ = cls


def norm_class_for(module: Any) -> type[ConvertedNorm] | None:
    """The class that `become_our_norm` gives a module; None if it is not a norm that crossgrain can compute."""
    if type(module) is nn.LayerNorm:
        return ConvertedLayerNorm if module.weight is not None and module.bias is not None else None
    if type(module) is nn.RMSNorm:
        return ConvertedRMSNorm if module.weight is not None and module.eps is not None else None
    return None


def become_our_norm(module: Any) -> None:
    """Change the class of an ``nn.LayerNorm`` or ``nn.RMSNorm``; `become_plain` undoes it."""
    cls = norm_class_for(module)
    assert cls is not None
    own: dict[str, Any] = {"zero_centered_gamma": False, "sequence_parallel": None}
    if cls is ConvertedRMSNorm:
        own["bias"] = None
    vars(module).update(own, _was=(type(module), tuple(own)))
    module.__class__ = cls
