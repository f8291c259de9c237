"""Small experiments: train a byte-level GPT on real text with several recipes, and compare loss, time and memory."""

from ..gpt import GPT, PRESETS, GPTConfig, Preset, Run, Text, Trainer, load_text
from .compare import Comparison, compare

__all__ = ["GPT", "PRESETS", "Comparison", "GPTConfig", "Preset", "Run", "Text", "Trainer", "compare", "load_text"]
