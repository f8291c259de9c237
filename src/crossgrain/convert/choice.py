"""The options ``skip`` and ``include`` of `convert`: patterns, types of modules, and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..recipe.binding import Layer, bound, layers_of, other_paths
from ..recipe.rules import Matcher, parse_matcher
from .accounting import known_projections

Choice = str | type[nn.Module] | Callable[[str, nn.Module], bool]


class Parts(NamedTuple):
    """What can be chosen from: modules that have layers, and parameters that are of no layer, by their paths."""

    model: nn.Module
    modules: Mapping[str, nn.Module]
    parameters: Sequence[str]


def layer_names(path: str, module: nn.Module) -> list[str]:
    """The names of the layers of a module in recipes."""
    projections = known_projections(module)
    return [projection.path_in(path) for projection in projections] if projections else [path]


def chosen_by(parts: Parts, choice: Choice | Iterable[Choice], option: str) -> dict[str, str]:
    """The paths of modules and parameters that an option means, each with the entry that matched.

    Args:
        parts: what can be chosen from.
        choice: the value of the option.
        option: its name, for messages.

    Raises:
        TypeError: an entry is of a wrong type.
        ValueError: an entry matches nothing, or only some of the layers of a module.
    """
    wanted: list[Any] = [choice] if isinstance(choice, str) or callable(choice) else list(choice)
    found: dict[str, str] = {}
    for entry in wanted:
        if isinstance(entry, str):
            layers = [*layers_of(parts.model, all_paths=True), *(Layer(path) for path in parts.parameters)]
            matcher = bound(parse_matcher(entry), parts.model, layers, None)
            paths, label = _matched(parts, matcher, f"{option} {entry!r}"), repr(entry)
        elif isinstance(entry, type):
            paths, label = _inside(parts, entry, option), entry.__name__
        elif callable(entry):
            paths = [path for path, module in parts.modules.items() if entry(path, module)]
            label = getattr(entry, "__name__", repr(entry))
        else:
            raise TypeError(
                f"{option} takes patterns, module types and functions, got {type(entry).__name__}: {entry!r}"
            )
        for path in paths:
            found.setdefault(path, f"{option} {label}")
    return found


def _matched(parts: Parts, matcher: Matcher, label: str) -> list[str]:
    """Paths of the modules whose layers the matcher matches under any of their paths, and of parameters."""
    others = other_paths(parts.model)
    found = [path for path in parts.parameters if matcher.matches(path, "linear")]
    for path, module in parts.modules.items():
        names = [layer_names(each, module) for each in (path, *others.get(path, ()))]
        hits = [[matcher.matches(name, "linear") for name in same] for same in names]
        if any(all(same) for same in hits):
            found.append(path)
        elif any(any(same) for same in hits):
            raise ValueError(
                f"{label} matches only some of the layers {', '.join(names[0])} of {path}, which are converted "
                f"together; to keep one in high precision, use a rule such as '{names[0][0]}: hp'"
            )
    return found


def _inside(parts: Parts, cls: type, option: str) -> list[str]:
    """Paths of modules that are of this type, and of modules and parameters inside a module of this type."""
    homes = [path for path, module in parts.model.named_modules() if isinstance(module, cls)]
    paths = [
        path
        for path in (*parts.modules, *parts.parameters)
        if any(not home or path == home or path.startswith(f"{home}.") for home in homes)
    ]
    if not paths:
        there = sorted({type(module).__name__ for module in parts.model.modules()})
        raise ValueError(
            f"{option}: no linear layer is a {cls.__name__} or inside one; this {type(parts.model).__name__} has "
            f"modules of the types {', '.join(there)}"
        )
    return paths
