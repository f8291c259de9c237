"""Small experiments: train a byte-level GPT on real text with several recipes, and compare loss, time and memory."""

from .compare import Comparison, compare
from .data import Text, load_text
from .gpt import GPT, GPTConfig
from .training import PRESETS, Preset, Run, Trainer

__all__ = ["GPT", "PRESETS", "Comparison", "GPTConfig", "Preset", "Run", "Text", "Trainer", "compare", "load_text"]
