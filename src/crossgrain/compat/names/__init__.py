"""The tables of names: for each module of Transformer Engine, the module or names of crossgrain it stands for."""

from __future__ import annotations

from .attention import ATTENTION
from .debug import DEBUG
from .distributed import DISTRIBUTED
from .entries import Entry
from .extension import EXTENSION
from .modules import MODULES
from .ops import OPS
from .quantization import QUANTIZATION
from .tensors import TENSORS
from .top import TOP

TREE: dict[str, Entry] = {
    **TOP,
    **QUANTIZATION,
    **TENSORS,
    **MODULES,
    **ATTENTION,
    **OPS,
    **DISTRIBUTED,
    **EXTENSION,
    **DEBUG,
}
