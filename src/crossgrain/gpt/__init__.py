"""A small GPT of plain torch modules, the text that it learns, and how it is trained: what examples are tried on."""

from .data import Text, load_text
from .model import GPT, GPTConfig
from .training import PRESETS, Preset, Run, Trainer

__all__ = ["GPT", "PRESETS", "GPTConfig", "Preset", "Run", "Text", "Trainer", "load_text"]
