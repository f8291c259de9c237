"""`convert` changes the products of a model to those of crossgrain, in place; `unconvert` undoes it."""

from . import attention, convolution, experts  # which register what they can convert
from .model import convert, unconvert
from .own_forward import OwnForward
from .report import ConvertReport
from .schedule import ScheduledConversion

__all__ = [
    "ConvertReport",
    "OwnForward",
    "ScheduledConversion",
    "attention",
    "convert",
    "convolution",
    "experts",
    "unconvert",
]
