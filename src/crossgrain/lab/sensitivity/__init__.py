"""Which GEMM of which layer can go to fewer bits: measured on a user's model, data and loss."""

from .calibration import calibrate
from .measure import sensitivity
from .result import Effect, LayerInfo, Sensitivity, Site

__all__ = ["Effect", "LayerInfo", "Sensitivity", "Site", "calibrate", "sensitivity"]
