"""Modules whose GEMMs run in the formats of a recipe."""

from .base import QuantizedModule, name_layers
from .linear import Linear, can_reconstruct_wgrad_input_from_original
from .requantize import requantize_

__all__ = ["Linear", "QuantizedModule", "can_reconstruct_wgrad_input_from_original", "name_layers", "requantize_"]
