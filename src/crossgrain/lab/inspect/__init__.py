"""See what quantization does to the tensors of a running training program."""

from .bad_step import BadStep, first_bad_step
from .inspector import Inspector
from .report import Inspection, read_inspection
from .writers import JsonlWriter, TensorBoardWriter, WandbWriter, Writer

__all__ = [
    "BadStep",
    "Inspection",
    "Inspector",
    "JsonlWriter",
    "TensorBoardWriter",
    "WandbWriter",
    "Writer",
    "first_bad_step",
    "read_inspection",
]
