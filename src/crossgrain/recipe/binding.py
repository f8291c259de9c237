"""Match the patterns of a recipe with the layers of a model, and suggest corrections for patterns that match none."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .projections import projections_of
from .roles import QuantizerRole
from .rule_index import RuleIndex
from .rules import Blocks, Glob, Matcher


@dataclass(frozen=True)
class Layer:
    """A layer, as the roles of its quantizers describe it."""

    name: str
    module_type: str = "linear"


def layers_of(model: nn.Module, all_paths: bool = False) -> list[Layer]:
    """List the layers of a model that a recipe can be for, in the order of the model.

    These are all ``nn.Linear``, Hugging Face's ``Conv1D``, the layers of modules with `get_quantizer_roles`, and the
    projections of modules that have an adapter.

    Args:
        model: the model.
        all_paths: list a module that has several paths under each of them, not only under the first.
    """
    layers: dict[Layer, None] = {}
    for path, module in model.named_modules(remove_duplicate=not all_paths):
        if hasattr(module, "get_quantizer_roles"):
            layers.update(dict.fromkeys(_layers_of_roles(path, module)))
        elif isinstance(module, nn.Linear) or is_conv1d(module):
            layers[Layer(path)] = None
        else:
            for projection in projections_of(module):
                layers[Layer(projection.path_in(path), projection.module_type)] = None
    return list(layers)


def other_paths(model: nn.Module) -> dict[str, list[str]]:
    """For modules that have several paths in the model: the other paths, by the first path."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), path)
        if known != path:
            others.setdefault(known, []).append(path)
    return others


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is a linear layer of Hugging Face's GPT-2. Checked by name: transformers may not be installed."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _layers_of_roles(path: str, module: nn.Module) -> list[Layer]:
    """The layers of one module, from the names in its roles. A module may have several: ``mlp.fc1`` and ``mlp.fc2``."""
    get: Any = module.get_quantizer_roles
    if "mode" in inspect.signature(get).parameters:
        roles = get("forward")
    else:
        counts: Any = getattr(module, "_slot_counts", lambda: {"forward": 3})
        roles = get(fwd=True, num_quantizers=counts()["forward"])
    own_name = getattr(module, "name", None) or ""
    layers = []
    for role in roles or ():
        if isinstance(role, QuantizerRole) and role.module_type:
            inner = role.layer[len(own_name) :] if role.layer.startswith(own_name) else ""
            layers.append(Layer(f"{path}.{inner.lstrip('.')}".strip("."), role.module_type))
    return layers


def bound(matcher: Matcher, model: nn.Module, layers: Sequence[Layer], blocks: str | None) -> Matcher:
    """Return ``matcher`` with the paths of its blocks filled in.

    Raises:
        ValueError: one of its patterns matches no layer of the model.
    """
    return bind_all(RuleIndex([matcher]), model, layers, blocks).matchers[0]


def bind_all(index: RuleIndex, model: nn.Module, layers: Sequence[Layer], blocks: str | None) -> RuleIndex:
    """Return the index of the same rules with the paths of their blocks filled in.

    Raises:
        ValueError: a pattern matches no layer of the model.
    """
    if any(isinstance(matcher, Blocks) for matcher in index.matchers):
        index = RuleIndex(
            [
                replace(each, paths=_block_paths(each, model, layers, blocks)) if isinstance(each, Blocks) else each
                for each in index.matchers
            ]
        )
    matched = {place for layer in layers for place in index.places(layer.name, layer.module_type)}
    for place, single in index.singles():
        if place not in matched:
            raise ValueError(
                f"'{single}' matches no layer of this {type(model).__name__}{_hint(single, model, layers)}"
            )
    return index


# ---- blocks ----------------------------------------------------------------------------------------


def _block_paths(wanted: Blocks, model: nn.Module, layers: Sequence[Layer], blocks: str | None) -> tuple[str, ...]:
    chosen: list[str] = []
    for stack, children in _stacks(model, layers, blocks).items():
        count = wanted.number_of(len(children))
        if count > len(children):
            raise ValueError(f"'{wanted.end} {count} blocks': {stack or 'the model'} has only {len(children)} blocks")
        chosen += children[:count] if wanted.end == "first" else children[-count:]
    return tuple(chosen)


def _stacks(model: nn.Module, layers: Sequence[Layer], blocks: str | None) -> dict[str, list[str]]:
    """Paths of blocks by the path of their container: one container, or all that the pattern ``blocks`` matches."""
    containers: dict[str, nn.Module] = dict(model.named_modules())
    children = {
        path: [f"{path}.{name}".lstrip(".") for name, _ in container.named_children()]
        for path, container in containers.items()
    }
    if blocks is not None:
        found = _outermost([path for path, paths in children.items() if fnmatchcase(path, blocks) and paths])
        if not found:
            raise ValueError(
                f"blocks={blocks!r} matches no module with children in this {type(model).__name__}"
                f"{_near(blocks, [path for path, paths in children.items() if paths])}"
            )
        return {path: children[path] for path in found}
    candidates = {
        path: children[path]
        for path, container in containers.items()
        if _is_stack(container)
        and len({type(child) for child in container.children()}) == 1
        and any(_is_inside(layer.name, path) for layer in layers)
    }
    longest = max(map(len, candidates.values()), default=0)
    best = _outermost([path for path, paths in candidates.items() if len(paths) == longest])
    if not best:
        raise ValueError(
            f"the blocks of this {type(model).__name__} cannot be found: it has no ModuleList, Sequential or numbered "
            "ModuleDict of modules of one type. Pass the path of the module that contains them, as in "
            "blocks='model.layers'"
        )
    if len(best) > 1:
        raise ValueError(
            f"{' and '.join(best)} have {longest} blocks each; choose one of them, as in blocks={best[0]!r}"
        )
    return {best[0]: candidates[best[0]]}


def _is_stack(container: nn.Module) -> bool:
    """Whether the children are in an order: of a ModuleDict, they are if all keys are numbers (as in torchtitan)."""
    if isinstance(container, nn.ModuleDict):
        return all(key.isdecimal() for key in container)
    return isinstance(container, nn.ModuleList | nn.Sequential)


def _outermost(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not any(_is_inside(path, other) for other in paths if other != path)]


def _is_inside(path: str, container: str) -> bool:
    return not container or path.startswith(container + ".")


# ---- near misses -----------------------------------------------------------------------------------


def _hint(matcher: Matcher, model: nn.Module, layers: Sequence[Layer]) -> str:
    if not layers:
        return ", because it has no nn.Linear and no module of crossgrain"
    if isinstance(matcher, Glob):
        pattern = matcher.patterns[0]
        for known, others in other_paths(model).items():
            for path in others:
                if fnmatchcase(path, pattern) and any(layer.name == known for layer in layers):
                    return f": {path} is another path of the layer {known}; rules use the first path, '{known}'"
        containers = [path for path, _ in model.named_modules() if path and fnmatchcase(path, pattern)]
        if containers:
            return f": {containers[0]} is not a layer; use '{pattern}.*' for the layers inside it"
        return _near(pattern, [layer.name for layer in layers])
    return f"; the module types of its layers are {', '.join(sorted({layer.module_type for layer in layers}))}"


def _near(pattern: str, names: Sequence[str]) -> str:
    """The names that are most similar to a pattern. ``*.head`` is compared with the last part of each name."""
    ending = pattern.removeprefix("*.") if pattern.startswith("*.") else None

    def similarity(name: str) -> float:
        if ending is not None:
            name = ".".join(name.split(".")[-(ending.count(".") + 1) :])
        return difflib.SequenceMatcher(None, ending or pattern, name).ratio()

    ranked = sorted(names, key=similarity, reverse=True)
    near = [name for name in ranked if similarity(name) >= 0.5][:3]  # less than half alike is no typing error
    return (
        f"; near misses: {', '.join(near)}" if near else f"; it has {', '.join(names[:5])}" + ", ..." * (len(names) > 5)
    )


# ---- names -----------------------------------------------------------------------------------------


def check_names(model: nn.Module) -> None:
    """Check that the name of every module of crossgrain is its path in the model: rules match by name.

    Raises:
        ValueError: a module has another name, or none.
    """
    for path, module in model.named_modules():
        name = getattr(module, "name", None)
        if path and hasattr(module, "get_quantizer_roles") and name != path:
            raise ValueError(
                f"{type(module).__name__} at {path!r} has the name {name!r}, so a rule for {path!r} would not match "
                "it. Call crossgrain.nn.name_layers(model) first: it names all modules without a name by their paths"
            )
