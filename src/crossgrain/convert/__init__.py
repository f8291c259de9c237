"""Any model, in place: its linear layers and norms become those of crossgrain, and back."""

from .model import ConvertReport, convert, unconvert

__all__ = ["ConvertReport", "convert", "unconvert"]
