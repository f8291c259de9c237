"""`convert` changes the linear layers and norms of a model to those of crossgrain, in place; `unconvert` undoes it."""

from .model import ConvertReport, convert, unconvert

__all__ = ["ConvertReport", "convert", "unconvert"]
