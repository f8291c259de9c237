"""Code that was written for Transformer Engine, run by crossgrain.

import crossgrain.compat.transformer_engine.pytorch as te     # the names, wherever they are wanted

crossgrain.compat.install()                                   # from here on `import transformer_engine` finds them
python -m crossgrain.te train.py --lr 1e-3                    # the same for one run of a script
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
