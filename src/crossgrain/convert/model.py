"""`convert`: make a model train in low precision with one line; `unconvert` undoes it.

    print(crossgrain.convert(model, "mxfp8; lm_head: hp"))

Every ``nn.Linear`` (and Hugging Face ``Conv1D``) becomes a quantized layer that is bound to the recipe. This happens in
place: module objects, parameters, names, hooks and state-dict keys stay the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .. import ops
from ..formats.dtypes import HIGH_PRECISION
from ..nn import QuantizedModule
from ..recipe import GemmRecipe, Recipe, as_recipe
from ..recipe.binding import bound, layers_of, other_paths
from ..recipe.explain import collapsed
from ..recipe.rules import Matcher, parse_matcher
from ..runtime.torch_patches.transformer_fast_path import close_fast_path, open_fast_path
from .layers import Converted, ConvertedNorm, become_our_norm, become_plain, become_quantized, class_for, norm_class_for
from .model_step import forget_calls, step_with_calls

Skip = str | type[nn.Module] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` did. ``print`` it to read it.

    Attributes:
        recipe: the recipe that the layers follow.
        converted: paths of layers that became quantized layers.
        bound: paths of layers that were crossgrain's before and follow the recipe now.
        left: paths of linear layers that were not converted, with the reason.
        norms: paths of norms that became crossgrain's.
    """

    recipe: Recipe
    converted: list[str] = field(default_factory=list)
    bound: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    norms: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        everything = [*self.converted, *self.bound, *self.left]
        lines = [f"recipe: {self.recipe}"]
        for title, paths in (("converted", self.converted), ("bound", self.bound)):
            if paths:
                lines.append(f"{title} {_layers(len(paths))}: {_names(paths, everything)}")
        if self.norms:
            count = f"{len(self.norms)} norm{'s' * (len(self.norms) != 1)}"
            lines.append(f"converted {count}: {_names(self.norms, self.norms)}")
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.left.items():
            by_reason.setdefault(reason, []).append(path)
        for reason, paths in by_reason.items():
            lines.append(f"left {_layers(len(paths))}: {_names(paths, everything)}: {reason}")
        return "\n".join(lines)


def convert(
    model: nn.Module,
    recipe: Recipe | str | os.PathLike[str],
    *,
    skip: Skip | Iterable[Skip] = (),
    norms: bool = False,
) -> ConvertReport:
    """Make the linear layers of a model compute in the formats of a recipe, in place.

    Layers are named by their paths. A model that was converted before follows the new recipe, and layers that are
    skipped now become plain again. If this raises, nothing has changed.

    Args:
        model: the model to change.
        recipe: a recipe, the name of a preset, a one-line recipe or a file. It is bound to the layers, so no autocast
            is needed. An autocast that is active overrides it; ``autocast(enabled=False)`` computes in high precision.
        skip: layers not to convert: patterns as in recipes (``"lm_head"``, ``"first 2 blocks"``), types (of the layer
            or of a module it is in), or functions of path and module that return True.
        norms: convert ``nn.LayerNorm`` and ``nn.RMSNorm`` too; crossgrain's compute in fp32 internally. Norms without
            weight, bias or eps are not converted.

    Returns:
        What was converted, and what was not and why.

    Raises:
        ValueError: the model has no linear layer, a pattern matches nothing, or the recipe does not fit the model.
    """
    recipe = as_recipe(recipe)
    report = ConvertReport(recipe)
    skipped = _skipped(model, skip)
    layers = dict(_linear_layers(model))
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no linear layer to convert")
    for path, layer in layers.items():
        reason = skipped.get(path) or _why_not(model, path, layer)
        if reason is not None:
            report.left[path] = reason
        else:
            (report.bound if _follows_recipes(layer) else report.converted).append(path)

    chosen = [*report.converted, *report.bound]
    bound_recipe = _bound_recipe(recipe, model, layers)
    for path in report.left:
        if isinstance(layers[path], Converted):
            become_plain(layers[path])
    for path in chosen:
        quantized: Any = layers[path]
        if not _follows_recipes(quantized):
            become_quantized(quantized)
            quantized.name = path or None
        quantized.bound_recipe = bound_recipe
    converted_norms = _convert_norms(model, norms)
    forget_calls(model)
    if bound_recipe.may_keep_histories():
        step_with_calls(model)
    for module in model.modules():
        if any(map(_follows_recipes, module.modules())):
            close_fast_path(module)
    return ConvertReport(bound_recipe, report.converted, report.bound, report.left, converted_norms)


def _convert_norms(model: nn.Module, wanted: bool) -> list[str]:
    """Convert norms and return their paths; without ``wanted``, converted norms become plain again."""
    changed = []
    for path, module in model.named_modules():
        if isinstance(module, ConvertedNorm) and not wanted:
            become_plain(module)
        elif wanted and (isinstance(module, ConvertedNorm) or norm_class_for(module) is not None):
            if not isinstance(module, ConvertedNorm):
                become_our_norm(module)
            changed.append(path)
    return changed


def unconvert(model: nn.Module) -> list[str]:
    """Undo `convert`: layers and norms become what they were.

    Layers that were created as crossgrain's stay, but are no longer bound to a recipe.

    Args:
        model: the model to change.

    Returns:
        The paths of the layers and norms that were changed back.
    """
    changed = []
    for path, module in model.named_modules():
        open_fast_path(module)
        forget_calls(module)
        if isinstance(module, Converted | ConvertedNorm):
            become_plain(module)
            changed.append(path)
        elif _follows_recipes(module):
            module.bound_recipe = None
    return changed


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All linear layers, with their paths, in the order of the model."""
    for path, module in model.named_modules():
        if _follows_recipes(module) or isinstance(module, nn.Linear) or class_for(module) is not None:
            yield path, module


def _follows_recipes(module: nn.Module) -> bool:
    """Whether a module is one of crossgrain's that follow recipes."""
    return isinstance(module, QuantizedModule | ops.Linear)


def _why_not(model: nn.Module, path: str, layer: nn.Module) -> str | None:
    """The reason why a layer cannot be converted; None if it can."""
    if _follows_recipes(layer):
        return None
    parent = model.get_submodule(path.rpartition(".")[0]) if path else None
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight without calling the layer"
    if "forward" in vars(layer):
        return "its forward was replaced on the object, so converting it would have no effect"
    if class_for(layer) is None:
        return f"{type(layer).__name__} is a subclass of nn.Linear, which may compute something else"
    dtype = layer.weight.dtype
    return None if dtype in HIGH_PRECISION else f"its weight has dtype {dtype}"


def _bound_recipe(recipe: Recipe, model: nn.Module, layers: dict[str, nn.Module]) -> Recipe:
    """Name the layers by their paths, and bind the recipe to the model. If it is refused, the names are restored."""
    named: list[tuple[Any, str | None]] = []
    for path, layer in layers.items():
        own: Any = layer
        if isinstance(layer, Converted) or (_follows_recipes(layer) and own.name is None):
            named.append((layer, own.name))
            own.name = path or None
    try:
        return recipe.for_model(model) if isinstance(recipe, GemmRecipe) else recipe
    except ValueError:
        for layer, name in named:
            layer.name = name
        raise


# ---- skip ------------------------------------------------------------------------------------------------


def _skipped(model: nn.Module, skip: Skip | Iterable[Skip]) -> dict[str, str]:
    """The paths to skip, each with the entry of ``skip`` that matched."""
    wanted: list[Any] = [skip] if isinstance(skip, str) or callable(skip) else list(skip)
    found: dict[str, str] = {}
    for entry in wanted:
        if isinstance(entry, str):
            matcher = bound(parse_matcher(entry), model, layers_of(model, all_paths=True), None)
            paths, label = _matched(model, matcher), repr(entry)
        elif isinstance(entry, type):
            paths, label = _inside(model, entry), entry.__name__
        elif callable(entry):
            paths = [path for path, module in _linear_layers(model) if entry(path, module)]
            label = getattr(entry, "__name__", repr(entry))
        else:
            raise TypeError(f"skip takes patterns, module types and functions, got {type(entry).__name__}: {entry!r}")
        for path in paths:
            found.setdefault(path, f"skip {label}")
    return found


def _matched(model: nn.Module, matcher: Matcher) -> list[str]:
    """Paths of the layers that the matcher matches under any of their paths."""
    others = other_paths(model)
    return [
        path
        for path, _ in _linear_layers(model)
        if any(matcher.matches(name, "linear") for name in (path, *others.get(path, ())))
    ]


def _inside(model: nn.Module, cls: type) -> list[str]:
    """Paths of linear layers that are of this type, or inside a module of this type."""
    homes = [path for path, module in model.named_modules() if isinstance(module, cls)]
    paths = [
        path
        for path, _ in _linear_layers(model)
        if any(not home or path == home or path.startswith(f"{home}.") for home in homes)
    ]
    if not paths:
        there = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"skip: no linear layer is a {cls.__name__} or inside one; this {type(model).__name__} has modules of the "
            f"types {', '.join(there)}"
        )
    return paths


# ---- text ------------------------------------------------------------------------------------------------


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _names(paths: list[str], known: list[str]) -> str:
    return ", ".join(name or "the model itself" for name in collapsed(paths, known))
