"""Write models for inference engines, in their own layouts, and load such files into models that train.

- `export` writes a directory for compressed-tensors, ModelOpt, gpt-oss, GGUF, or with plain tensors.
- `load_exported` loads such a directory into a model whose layers follow a recipe, byte for byte.
"""

from .loading import load_exported
from .writing import ExportReport, export

__all__ = ["ExportReport", "export", "load_exported"]
