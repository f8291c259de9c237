"""Options that choose the size of the small GPT."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Annotated

import typer

from ..gpt.training import PRESETS, Preset

SizeName = Enum("SizeName", {name: name for name in PRESETS})  # type: ignore[misc]  # an option has to be an Enum
Size = Annotated[SizeName, typer.Option("--size", help="Size of the model, and how it is trained.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Number of steps; default: that of the size.")]


def preset_of(size: SizeName, steps: int | None = None) -> Preset:
    """The preset of a size, with another number of steps if given."""
    preset = PRESETS[size.value]
    return preset if steps is None else replace(preset, steps=steps)
