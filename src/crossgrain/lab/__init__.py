"""Experiments with recipes: on a user's own model and training loop, and on a small byte-level GPT."""

from ..gpt import GPT, PRESETS, GPTConfig, Preset, Run, Text, Trainer, load_text
from .compare import Comparison, compare
from .inspect import Inspection, Inspector, JsonlWriter, TensorBoardWriter, WandbWriter, read_inspection
from .replay import Replay, ReplayError, ReplayStep, replay
from .report import write_report
from .search import Found, frontier, search
from .sensitivity import Sensitivity, calibrate, sensitivity
from .start import Start
from .study import Study, study
from .verify import BranchError, Verification, verify

__all__ = [
    "GPT",
    "PRESETS",
    "BranchError",
    "Comparison",
    "Found",
    "GPTConfig",
    "Inspection",
    "Inspector",
    "JsonlWriter",
    "Preset",
    "Replay",
    "ReplayError",
    "ReplayStep",
    "Run",
    "Sensitivity",
    "Start",
    "Study",
    "TensorBoardWriter",
    "Text",
    "Trainer",
    "Verification",
    "WandbWriter",
    "calibrate",
    "compare",
    "frontier",
    "load_text",
    "read_inspection",
    "replay",
    "search",
    "sensitivity",
    "study",
    "verify",
    "write_report",
]
