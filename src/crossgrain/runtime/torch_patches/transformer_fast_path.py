"""Close the fast path of torch's Transformer layers in converted models.

Why: for inference these layers have a fast path that reads weights and does not call the linear layers. In a converted
model it would compute in high precision, without a message.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# The attribute on which the fast path depends, and the value that closes it.
_SWITCHES: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_KEPT = "_open_fast_path"


def close_fast_path(module: nn.Module) -> None:
    """Make ``module`` always call its linear layers, if it has a fast path."""
    for cls, (name, closed) in _SWITCHES.items():
        if isinstance(module, cls) and _KEPT not in vars(module):
            vars(module)[_KEPT] = getattr(module, name)
            setattr(module, name, closed)


def open_fast_path(module: nn.Module) -> None:
    """Undo `close_fast_path`."""
    for cls, (name, _) in _SWITCHES.items():
        if isinstance(module, cls) and _KEPT in vars(module):
            setattr(module, name, vars(module).pop(_KEPT))
