"""Experiments with recipes: on a user's own model and training loop, and on a small byte-level GPT."""

from ..gpt import GPT, PRESETS, GPTConfig, Preset, Run, Text, Trainer, load_text
from .compare import Comparison, compare
from .report import write_report
from .sensitivity import Sensitivity, sensitivity
from .start import Start
from .verify import BranchError, Verification, verify

__all__ = [
    "GPT",
    "PRESETS",
    "BranchError",
    "Comparison",
    "GPTConfig",
    "Preset",
    "Run",
    "Sensitivity",
    "Start",
    "Text",
    "Trainer",
    "Verification",
    "compare",
    "load_text",
    "sensitivity",
    "verify",
    "write_report",
]
