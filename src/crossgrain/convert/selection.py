"""Which layers of a model `convert` changes, and why it leaves the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from .. import ops
from ..formats.dtypes import HIGH_PRECISION
from ..nn import QuantizedModule
from ..recipe import GemmRecipe, Recipe
from ..recipe.projections import adapter_for
from .accounting import known_projections
from .choice import Choice, Parts, chosen_by, layer_names
from .defaults import KINDS, left_by_default
from .layers import Converted, class_for
from .projections import ConvertedProjections, why_not_projections

WITHOUT_CALLING = "multiplies its weight without calling the layer"


@dataclass
class Selection:
    """What to do with the layers of a model. Keys are paths of modules.

    Attributes:
        modules: all modules that have layers, in the order of the model.
        chosen: modules to convert, or to bind to the recipe.
        left: modules to leave, with the reason.
        unasked: those in ``left`` that cannot be converted, which nobody asked for.
        skipped: parameters of no layer that ``skip`` names, with the reason.
    """

    modules: Mapping[str, nn.Module]
    chosen: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    unasked: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)


def select(
    model: nn.Module,
    recipe: Recipe,
    skip: Choice | Iterable[Choice],
    include: Choice | Iterable[Choice],
    parameters: Sequence[str] = (),
    readers: Mapping[str, str] | None = None,
) -> Selection:
    """Choose the layers to convert.

    Args:
        model: the model.
        recipe: its rules may name layers that stay in high precision by default.
        skip: see `convert`.
        include: see `convert`.
        parameters: paths of parameters that may be multiplied and are of no layer, which ``skip`` may name as well.
        readers: paths of layers that sample inputs did not call: a module of this type multiplies their weights.

    Raises:
        TypeError: an entry of ``skip`` or ``include`` is of a wrong type.
        ValueError: an entry matches nothing, or only some projections of a module.
    """
    parts = Parts(model, dict(modules_with_layers(model)), parameters)
    skipped, included = chosen_by(parts, skip, "skip"), chosen_by(parts, include, "include")
    selection = Selection(parts.modules, skipped={path: skipped[path] for path in parameters if path in skipped})
    by_default = left_by_default(model)
    for path, module in selection.modules.items():
        reason = skipped.get(path)
        built_here = follows_recipes(module) and not isinstance(module, Converted | ConvertedProjections)
        kind = None if built_here else by_default.get(path)  # who built a head of our layers wants it
        if reason is None and kind is not None and path not in included and not _has_rule(recipe, path, module):
            reason = _by_default(kind, path)
        if reason is None:
            reason = _why_not(model, path, module, selection)
            if reason is None and readers and path in readers and not _in_attention(model, path):
                reason = f"{readers[path]} {WITHOUT_CALLING}, so converting it would have no effect"
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


def _by_default(kind: str, path: str) -> str:
    return f"by default, {KINDS[kind]} stay in high precision; include={path!r} or a rule for it converts it"


def _has_rule(recipe: Recipe, path: str, module: nn.Module) -> bool:
    """Whether a rule of the recipe names a layer of this module."""
    if not isinstance(recipe, GemmRecipe):
        return False
    return any(recipe.names_layer(name) for name in layer_names(path, module))


def _in_attention(model: nn.Module, path: str) -> bool:
    """Whether a layer is the output projection of torch's attention, which reads its weight."""
    return bool(path) and isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention)


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
    if _in_attention(model, path):
        if path.rpartition(".")[0] not in selection.chosen:
            return "its nn.MultiheadAttention, which is not converted, reads its weight without calling the layer"
    elif is_lazy(module.weight):
        return "its weight has no shape yet; call the model once before it is converted"
    elif is_parametrized(module):
        return "it is parametrized, so its weight is computed in every call; convert the model before"
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
