"""Run code that was written for Transformer Engine with crossgrain, unchanged and without a GPU.

There are three ways:

    import crossgrain.compat.transformer_engine.pytorch as te    # import the names explicitly
    crossgrain.compat.install()                                  # then `import transformer_engine` finds crossgrain
    python -m crossgrain.te train.py --lr 1e-3                   # run one script with crossgrain installed this way
"""

from .alias import VERSION, install, is_installed, uninstall
from .needs_cuda import NeedsCudaError
from .tree import MODULES as _MODULES

transformer_engine = _MODULES["transformer_engine"]
transformer_engine_torch = _MODULES["transformer_engine_torch"]

__all__ = [
    "VERSION",
    "NeedsCudaError",
    "install",
    "is_installed",
    "transformer_engine",
    "transformer_engine_torch",
    "uninstall",
]
