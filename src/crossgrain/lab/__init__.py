"""Experiments that fit a laptop: a small GPT on real text, trained by several recipes, and what they cost."""

from .compare import Comparison, compare
from .data import Text, load_text
from .gpt import GPT, GPTConfig
from .training import PRESETS, Preset, Run, Trainer

__all__ = ["GPT", "PRESETS", "Comparison", "GPTConfig", "Preset", "Run", "Text", "Trainer", "compare", "load_text"]
