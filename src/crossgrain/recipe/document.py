"""The parsed content of a recipe in one line or in a file: settings, rules and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .format_spec import FormatSpec
from .layer_formats import KEYS, Settings, make_setting, make_settings
from .rules import Rule, parse_matcher
from .syntax import RecipeSyntaxError, did_you_mean

OPTIONS = ("allow_mixed", "backward_override", "blocks")


@dataclass
class Document:
    """The content of a recipe's text.

    Attributes:
        preset: name of a preset that the rest changes; None if there is none.
        settings: formats and sources by key (see `layer_formats`).
        options: options of the whole recipe.
        rules: exceptions for some layers.
    """

    preset: str | None = None
    settings: dict[str, FormatSpec | str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)

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
        if value not in truths:
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


def make_rule(pattern: str, value: Any) -> Rule:
    """Make a rule: ``make_rule("*.lm_head", "hp")``.

    Args:
        pattern: which layers the rule is for.
        value: a format for all three GEMMs, or a mapping of settings.
    """
    if not isinstance(value, Mapping):
        value = {"all": value}
    return Rule(parse_matcher(pattern), make_settings(value))


def document_of(mapping: Mapping[str, Any]) -> Document:
    """Parse the content of a file. Errors name the key."""
    document = Document()
    for key, value in mapping.items():
        if key == "rules":
            for number, (pattern, settings) in enumerate(_pairs(value), 1):
                with _errors_at(f"rule {number}"):
                    document.rules.append(make_rule(str(pattern), settings))
        elif key == "preset":
            document.preset = str(value)
        else:
            with _errors_at(str(key)):
                document.set(str(key), value)
    return document


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    try:
        yield
    except RecipeSyntaxError as error:
        raise RecipeSyntaxError(f"{place}: {error.message}", *error.args[1:]) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from None


def _pairs(rules: Any) -> Iterable[tuple[Any, Any]]:
    """The rules as pairs, from a mapping or from a list of mappings with one key each. A list may repeat a pattern."""
    if isinstance(rules, Mapping):
        return rules.items()
    if not isinstance(rules, Sequence) or not all(isinstance(rule, Mapping) and len(rule) == 1 for rule in rules):
        raise ValueError("rules must be a list of entries like {'*.lm_head': 'hp'}, or one mapping")
    return [pair for rule in rules for pair in rule.items()]


def mapping_of(settings: Settings, rules: Sequence[Rule], options: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a recipe's file: only strings, numbers, lists and dicts."""
    mapping: dict[str, Any] = {key: str(value) for key, value in settings}
    mapping.update(options)
    if rules:
        mapping["rules"] = [{str(rule.matcher): _rule_value(rule)} for rule in rules]
    return mapping


def _rule_value(rule: Rule) -> str | dict[str, str]:
    values = {key: str(value) for key, value in rule.settings}
    return values["all"] if list(values) == ["all"] else values
