"""What is where: for each dotted name of Transformer Engine, the module of crossgrain that serves."""

from __future__ import annotations

from .attention import ATTENTION
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
}
