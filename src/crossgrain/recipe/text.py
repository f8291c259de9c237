"""Recipes in one line of text.

    fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4(rht, sr), weight.source: dequantized; *.lm_head: hp

Before the first ``;`` are the settings and options of the recipe, separated by commas. The first of them may have no
key: it is then the name of a preset, or a format for all GEMMs. After each ``;`` is a rule, ``pattern: settings``. Its
first setting may be such a word too. After a key there is always a format: ``nvfp4`` is a preset, ``all: nvfp4`` is
the plain format. A rule for some steps is a phase, ``last 10 % of steps: hp``, and makes the line a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..gemm.operands import GEMMS, TENSORS
from .document import OPTIONS, Document
from .format_spec import FormatSpec, aliases, format_names
from .layer_formats import KEYS, Settings, make_settings
from .phases import PhaseRule, parse_pattern
from .presets import PRESETS, SCHEDULES, preset_name, schedule_name
from .rules import Rule
from .syntax import RecipeSyntaxError, did_you_mean


def parse_line(text: str) -> Document:
    """Parse a recipe in one line.

    Raises:
        RecipeSyntaxError: the text is not a recipe; the message points at the mistake.
    """
    (start, end), *rules = _split(text, 0, len(text), ";")
    document = Document()
    for index, (key, value_start, value_end) in enumerate(_entries(text, start, end)):
        value = text[value_start:value_end]
        if key is None and index == 0 and (preset_name(value) or schedule_name(value)):
            document.preset = preset_name(value) or schedule_name(value)
        elif key is None and index > 0:
            raise RecipeSyntaxError(f"{value!r} needs a key, like 'fprop: {value}'", text, value_start, value_end)
        else:
            if key is None:
                _check_name(text, value_start, value_end)
            _set(document, key or "all", text, value_start, value_end)
    for start, end in rules:
        if start == end:
            raise RecipeSyntaxError("expected a rule after ';'", text, max(0, start - 1), start + 1)
        document.rules.append(_rule(text, start, end))
    return document


def settings_of_preset(word: str) -> dict[str, Any]:
    """What a preset sets in a rule: everything about the three GEMMs, also the sources."""
    name = preset_name(word)
    assert name is not None
    document = parse_line(PRESETS[name].line)
    if document.options or document.rules or document.preset:
        raise ValueError(
            f"the preset {name} has options or rules of its own, so it cannot be used in a rule. Begin the recipe with "
            "it and except other layers by rules; or write its settings in the rule, and its options at the beginning"
        )
    sources = {} if "all" in document.settings else {f"{tensor}.source": "original" for tensor in TENSORS}
    return {**sources, **document.settings}


def left_of_preset(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings of a preset that the settings after it do not replace: ``all`` replaces all about the GEMMs."""
    replaced = {*settings, *((*GEMMS, *TENSORS) if "all" in settings else ())}
    return {key: value for key, value in base.items() if key.partition(".")[0] not in replaced}


def is_other_preset(text: str) -> bool:
    """Whether a format, without a key, would be read as a preset that is more than this format."""
    return preset_name(text) is not None and settings_of_preset(text) != {"all": FormatSpec.parse(text)}


def format_line(settings: Settings, rules: Sequence[Rule | PhaseRule], options: Mapping[str, Any]) -> str:
    """Write a recipe in one line, which `parse_line` reads."""
    words = [_settings_text(settings)]
    words += [f"{key}: {str(value).lower() if value is True else value}" for key, value in options.items()]
    return "; ".join([", ".join(words), *(f"{rule.pattern}: {_settings_text(rule.settings)}" for rule in rules)])


def parse_rule(text: str) -> Rule | PhaseRule:
    """Parse a rule, ``*.lm_head: hp``, or a phase, ``last 10 % of steps: hp``."""
    return _rule(text, *_strip(text, 0, len(text)))


def _check_name(text: str, start: int, end: int) -> None:
    """Raise if a first word is neither a preset nor a format, with a suggestion from both."""
    name = text[start:end].partition("(")[0].strip()
    known = [*PRESETS, *SCHEDULES, *format_names(), *aliases()]
    if name not in known and name.lower() not in known:
        raise RecipeSyntaxError(f"there is no preset or format {name!r}{did_you_mean(name, known)}", text, start, end)


def _settings_text(settings: Settings) -> str:
    return ", ".join(
        str(value) if key == "all" and not is_other_preset(str(value)) else f"{key}: {value}" for key, value in settings
    )


def make_rule_of(pattern: str, settings: Settings) -> Rule | PhaseRule:
    """Make a rule or a phase of its pattern and its settings.

    Raises:
        RecipeSyntaxError: the text is neither a pattern nor a phase.
    """
    steps, matcher = parse_pattern(pattern)
    if steps is not None:
        return PhaseRule(steps, matcher, settings)
    assert matcher is not None
    return Rule(matcher, settings)


def _rule(text: str, start: int, end: int) -> Rule | PhaseRule:
    colon = text.find(":", start, end)
    if colon < 0:
        raise RecipeSyntaxError("a rule must be written as 'pattern: format'", text, start, end)
    pattern = text[start:colon]
    if pattern.strip() in (*KEYS, *OPTIONS):
        raise RecipeSyntaxError(
            f"{pattern.strip()!r} is a setting, but only rules may follow ';'. Separate settings by ','",
            text,
            start,
            colon,
        )
    try:
        parse_pattern(pattern)  # before its settings, so that the first mistake is shown
    except RecipeSyntaxError as error:
        raise error.within(text, start) from None
    document, base = Document(), {}
    for index, (key, value_start, value_end) in enumerate(_entries(text, *_strip(text, colon + 1, end))):
        value = text[value_start:value_end]
        if key is None and index == 0 and preset_name(value) is not None:
            base = settings_of_preset(value)
            continue
        if key in OPTIONS:
            raise RecipeSyntaxError(
                f"{key} is an option of the whole recipe and cannot be set in a rule", text, value_start, value_end
            )
        if key is None and index > 0:
            raise RecipeSyntaxError(f"{value!r} needs a key, like 'fprop: {value}'", text, value_start, value_end)
        _set(document, key or "all", text, value_start, value_end)
    return make_rule_of(pattern, make_settings({**left_of_preset(base, document.settings), **document.settings}))


def _set(document: Document, key: str, text: str, start: int, end: int) -> None:
    try:
        document.set(key, text[start:end])
    except RecipeSyntaxError as error:
        raise error.within(text, start) from None
    except ValueError as error:
        raise RecipeSyntaxError(str(error), text, start, end) from None


def _entries(text: str, start: int, end: int) -> Iterator[tuple[str | None, int, int]]:
    """For each ``key: value`` between commas: the key (None without a key), and the position of the value."""
    for first, last in _split(text, start, end, ","):
        if first == last:
            raise RecipeSyntaxError("expected a setting, like 'fprop: mxfp8'", text, first, first + 1)
        colon = text.find(":", first, last)
        if colon < 0:
            yield None, first, last
            continue
        key = text[first:colon].strip()
        if key not in (*KEYS, *OPTIONS):
            hint = did_you_mean(key, [*KEYS, *OPTIONS])
            raise RecipeSyntaxError(f"there is no setting {key!r}{hint}", text, first, max(first + 1, colon))
        value_start, value_end = _strip(text, colon + 1, last)
        if value_start == value_end:
            raise RecipeSyntaxError(f"{key} needs a value", text, first, last)
        yield key, value_start, value_end


def _split(text: str, start: int, end: int, separator: str) -> list[tuple[int, int]]:
    """Positions of the parts between separators outside of parentheses, without the blanks around them."""
    depth, first, places = 0, start, []
    for i in range(start, end):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if text[i] == separator and depth <= 0:
            places.append(_strip(text, first, i))
            first = i + 1
    return [*places, _strip(text, first, end)]


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end
