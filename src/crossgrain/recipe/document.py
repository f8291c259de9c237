"""The parsed content of a recipe, from one line or from a file: settings, rules and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .format_spec import FormatSpec
from .layer_formats import KEYS, make_setting
from .phases import PhaseRule
from .rules import Rule
from .syntax import did_you_mean

OPTIONS = ("allow_mixed", "backward_override", "blocks")


@dataclass
class Document:
    """The content of a recipe's text.

    Attributes:
        preset: name of a preset that the rest changes; None if there is none.
        settings: formats and sources by key (see `layer_formats`).
        options: options of the whole recipe.
        rules: exceptions for some layers, and for some steps (which only a schedule may have).
    """

    preset: str | None = None
    settings: dict[str, FormatSpec | str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rules: list[Rule | PhaseRule] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        """Parse, check and store one setting or option."""
        if key in self.settings or key in self.options:
            raise ValueError(f"{key} is set twice")
        if key in OPTIONS:
            self.options[key] = make_option(key, value)
        elif key in KEYS:
            self.settings[key] = make_setting(key, value)
        else:
            raise ValueError(f"there is no setting {key!r}{did_you_mean(key, [*KEYS, *OPTIONS])}")


def make_option(key: str, value: Any) -> Any:
    """Parse and check the value of an option of the whole recipe."""
    if key == "allow_mixed":
        truths = {"true": True, "false": False, True: True, False: False}
        if not isinstance(value, (str, bool)) or value not in truths:
            raise ValueError(f"allow_mixed must be true or false, got {value!r}")
        return truths[value]
    if value is None or value == "none":
        return None
    if key == "backward_override" and value not in ("high_precision", "dequantized"):
        raise ValueError(f"backward_override must be high_precision or dequantized, got {value!r}")
    if key == "blocks" and (not isinstance(value, str) or value != value.strip() or set(value) & set(" ,;:")):
        raise ValueError(
            f"blocks must be the path of the module whose children are the blocks, like 'model.layers', got {value!r}"
        )
    return value
