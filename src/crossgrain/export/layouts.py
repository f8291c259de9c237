"""The list of layouts, by the names that users give them."""

from __future__ import annotations

from .compressed_tensors import CompressedTensors
from .gguf import Gguf
from .gpt_oss import GptOss
from .layout import Layout
from .modelopt import ModelOpt
from .plain import Plain

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (CompressedTensors(), ModelOpt(), GptOss(), Gguf(), Plain())
}


def layout_named(name: str) -> Layout:
    """The layout that users call ``name``.

    Raises:
        ValueError: there is none.
    """
    found = LAYOUTS.get(name.lower().replace("_", "-"))
    if found is None:
        raise ValueError(f"format must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return found
