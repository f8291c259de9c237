"""Recipes as mappings, which is what their files contain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .document import Document
from .layer_formats import Settings, make_settings
from .phases import PhaseRule
from .presets import preset_name
from .rules import Rule
from .syntax import RecipeSyntaxError
from .text import is_other_preset, make_rule_of, settings_of_preset


def make_rule(pattern: str, value: Any) -> Rule | PhaseRule:
    """Make a rule, ``make_rule("*.lm_head", "hp")``, or a phase, ``make_rule("last 10 % of steps", "hp")``.

    Args:
        pattern: which layers or steps it is for.
        value: the name of a preset, a format for all three GEMMs, or a mapping of settings.
    """
    if isinstance(value, str) and preset_name(value) is not None:
        value = settings_of_preset(value)
    elif not isinstance(value, Mapping):
        value = {"all": value}
    return make_rule_of(pattern, make_settings(value))


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


def mapping_of(settings: Settings, rules: Sequence[Rule | PhaseRule], options: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a recipe's file: only strings, numbers, lists and dicts."""
    mapping: dict[str, Any] = {key: str(value) for key, value in settings}
    mapping.update(options)
    if rules:
        mapping["rules"] = [{rule.pattern: _rule_value(rule)} for rule in rules]
    return mapping


def _rule_value(rule: Rule | PhaseRule) -> str | dict[str, str]:
    values = {key: str(value) for key, value in rule.settings}
    return values["all"] if list(values) == ["all"] and not is_other_preset(values["all"]) else values
