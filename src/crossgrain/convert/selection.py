"""Which layers of a model `convert` changes, and why it leaves the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .. import ops
from ..formats.dtypes import HIGH_PRECISION
from ..nn import QuantizedModule
from ..recipe import GemmRecipe, Recipe
from ..recipe.binding import bound, layers_of, other_paths
from ..recipe.projections import adapter_for
from ..recipe.rules import Matcher, parse_matcher
from .accounting import known_projections
from .defaults import KINDS, left_by_default
from .layers import Converted, class_for
from .projections import ConvertedProjections, why_not_projections

Choice = str | type[nn.Module] | Callable[[str, nn.Module], bool]


@dataclass
class Selection:
    """What to do with the layers of a model. Keys are paths of modules.

    Attributes:
        modules: all modules that have layers, in the order of the model.
        chosen: modules to convert, or to bind to the recipe.
        left: modules to leave, with the reason.
        unasked: those in ``left`` that cannot be converted, which nobody asked for.
    """

    modules: dict[str, nn.Module]
    chosen: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    unasked: set[str] = field(default_factory=set)


def select(
    model: nn.Module, recipe: Recipe, skip: Choice | Iterable[Choice], include: Choice | Iterable[Choice]
) -> Selection:
    """Choose the layers to convert.

    Raises:
        TypeError: an entry of ``skip`` or ``include`` is of a wrong type.
        ValueError: an entry matches nothing, or only some projections of a module.
    """
    skipped, included = _chosen_by(model, skip, "skip"), _chosen_by(model, include, "include")
    selection = Selection(dict(modules_with_layers(model)))
    by_default = left_by_default(model)
    for path, module in selection.modules.items():
        reason = skipped.get(path)
        built_here = follows_recipes(module) and not isinstance(module, Converted | ConvertedProjections)
        kind = None if built_here else by_default.get(path)  # who built a head of our layers wants it
        if reason is None and kind is not None and path not in included and not _has_rule(recipe, path, module):
            reason = _by_default(kind, path)
        if reason is None:
            reason = _why_not(model, path, module, selection)
            selection.unasked |= {path} if reason is not None else set()
        if reason is None:
            selection.chosen.append(path)
        else:
            selection.left[path] = reason
    return selection


def follows_recipes(module: nn.Module) -> bool:
    """Whether a module is one of crossgrain's that follow recipes."""
    return isinstance(module, QuantizedModule | ops.Linear)


def modules_with_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules that are linear layers or have projections, with their paths, in the order of the model."""
    for path, module in model.named_modules():
        if (
            follows_recipes(module)
            or isinstance(module, nn.Linear)
            or class_for(module) is not None
            or adapter_for(module) is not None
        ):
            yield path, module


def layer_names(path: str, module: nn.Module) -> list[str]:
    """The names of the layers of a module in recipes."""
    projections = known_projections(module)
    return [projection.path_in(path) for projection in projections] if projections else [path]


def _by_default(kind: str, path: str) -> str:
    return f"by default, {KINDS[kind]} stay in high precision; include={path!r} or a rule for it converts it"


def _has_rule(recipe: Recipe, path: str, module: nn.Module) -> bool:
    """Whether a rule of the recipe names a layer of this module."""
    if not isinstance(recipe, GemmRecipe):
        return False
    return any(recipe.names_layer(name) for name in layer_names(path, module))


def _why_not(model: nn.Module, path: str, module: Any, selection: Selection) -> str | None:
    """The reason why a module cannot be converted; None if it can."""
    if follows_recipes(module):
        return None
    if "forward" in vars(module):
        return "its forward was replaced on the object, so converting it would have no effect"
    if adapter_for(module) is not None:
        reason = why_not_projections(module)
        if reason is not None:
            return reason
        return _why_not_dtype(projection.parameter(module).dtype for projection in known_projections(module))
    parent_path = path.rpartition(".")[0]
    if path and isinstance(model.get_submodule(parent_path), nn.MultiheadAttention):
        if parent_path not in selection.chosen:
            return "its nn.MultiheadAttention, which is not converted, reads its weight without calling the layer"
    elif class_for(module) is None:
        name = type(module).__name__
        return (
            f"{name} is a subclass of nn.Linear, which may compute something else; if it calls F.linear with its "
            f"weight, crossgrain.register_layer({name}, crossgrain.OwnForward('weight')) converts it"
        )
    return _why_not_dtype([module.weight.dtype])


def _why_not_dtype(dtypes: Iterable[Any]) -> str | None:
    wrong = [dtype for dtype in dtypes if dtype not in HIGH_PRECISION]
    return f"its weight has dtype {wrong[0]}; only float32, bfloat16 and float16 can be quantized" if wrong else None


# ---- skip and include ------------------------------------------------------------------------------------


def _chosen_by(model: nn.Module, choice: Choice | Iterable[Choice], option: str) -> dict[str, str]:
    """The paths that ``skip`` or ``include`` mean, each with the entry that matched."""
    wanted: list[Any] = [choice] if isinstance(choice, str) or callable(choice) else list(choice)
    found: dict[str, str] = {}
    for entry in wanted:
        if isinstance(entry, str):
            matcher = bound(parse_matcher(entry), model, layers_of(model, all_paths=True), None)
            paths, label = _matched(model, matcher, f"{option} {entry!r}"), repr(entry)
        elif isinstance(entry, type):
            paths, label = _inside(model, entry, option), entry.__name__
        elif callable(entry):
            paths = [path for path, module in modules_with_layers(model) if entry(path, module)]
            label = getattr(entry, "__name__", repr(entry))
        else:
            raise TypeError(
                f"{option} takes patterns, module types and functions, got {type(entry).__name__}: {entry!r}"
            )
        for path in paths:
            found.setdefault(path, f"{option} {label}")
    return found


def _matched(model: nn.Module, matcher: Matcher, label: str) -> list[str]:
    """Paths of the modules whose layers the matcher matches under any of their paths."""
    others = other_paths(model)
    found = []
    for path, module in modules_with_layers(model):
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


def _inside(model: nn.Module, cls: type, option: str) -> list[str]:
    """Paths of modules that are of this type, or inside a module of this type."""
    homes = [path for path, module in model.named_modules() if isinstance(module, cls)]
    paths = [
        path
        for path, _ in modules_with_layers(model)
        if any(not home or path == home or path.startswith(f"{home}.") for home in homes)
    ]
    if not paths:
        there = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"{option}: no linear layer is a {cls.__name__} or inside one; this {type(model).__name__} has modules of "
            f"the types {', '.join(there)}"
        )
    return paths
