"""Notice converted layers that are never called, because another module multiplies their weights itself.

Converting such a layer has no effect: its products stay in high precision. Shapes do not show it, but training does:
the weight gets a gradient although the layer has not run. So a hook waits for the first gradient of each weight.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..nn import QuantizedModule
from ..runtime.logs import warn

_handles: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # of hooks; not pickled with layers


def watch(model: nn.Module, layers: Sequence[Any]) -> None:
    """Warn if the weight of one of these layers gets its first gradient before the layer has run."""
    owners = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    for layer in layers:
        forget(layer)
        weight = layer._parameters.get("weight")
        # A weight that is tied to another has gradients of the other, too.
        if type(weight) is nn.Parameter and weight.requires_grad and owners[id(weight)] == 1:
            hook = partial(_on_gradient, weakref.ref(layer))
            _handles[layer] = weight.register_post_accumulate_grad_hook(hook)


def forget(module: Any) -> None:
    """Undo `watch`."""
    handle = _handles.pop(module, None)
    if handle is not None:
        handle.remove()


def _on_gradient(ref: weakref.ref[Any], weight: Tensor) -> None:
    module = ref()
    if module is None:
        return
    forget(module)
    if isinstance(module, QuantizedModule) and not module.has_run:
        warn(
            __name__,
            f"{module.layer}: its weight has a gradient, but the layer was never called. Another module multiplies the "
            "weight itself, in high precision, so converting the layer has no effect. skip it; or convert with sample "
            "inputs, whose report lists all such layers",
        )
