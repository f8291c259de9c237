"""What a recipe's patterns mean in a model: its layers, its blocks, and what a wrong pattern may have meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .roles import QuantizerRole
from .rules import Blocks, Glob, Matcher


@dataclass(frozen=True)
class Layer:
    """A layer as its roles describe it."""

    name: str
    module_type: str = "linear"


def layers_of(model: nn.Module, all_paths: bool = False) -> list[Layer]:
    """Every ``nn.Linear``, Hugging Face ``Conv1D`` and module with `get_quantizer_roles`, in the order of the model.

    A module that has several paths is known by the first, unless ``all_paths`` are asked for.
    """
    layers: dict[Layer, None] = {}
    for path, module in model.named_modules(remove_duplicate=not all_paths):
        if hasattr(module, "get_quantizer_roles"):
            layers.update(dict.fromkeys(_layers_of_roles(path, module)))
        elif isinstance(module, nn.Linear) or is_conv1d(module):
            layers[Layer(path)] = None
    return list(layers)


def other_paths(model: nn.Module) -> dict[str, list[str]]:
    """The further paths of modules that have several, by the first."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), path)
        if known != path:
            others.setdefault(known, []).append(path)
    return others


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is a linear layer of Hugging Face's GPT-2, told by name: transformers need not be there."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _layers_of_roles(path: str, module: nn.Module) -> list[Layer]:
    """One module may hold several layers (``mlp.fc1`` and ``mlp.fc2``): each role says of which it is."""
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
            inner = role.name[len(own_name) :] if role.name.startswith(own_name) else ""
            layers.append(Layer(f"{path}.{inner.lstrip('.')}".strip("."), role.module_type))
    return layers


def bound(matcher: Matcher, model: nn.Module, layers: Sequence[Layer], blocks: str | None) -> Matcher:
    """``matcher`` with its blocks known; ValueError if any of its patterns matches no layer."""
    if isinstance(matcher, Blocks):
        matcher = replace(matcher, paths=_block_paths(matcher, model, layers, blocks))
    singles = [Glob((pattern,)) for pattern in matcher.patterns] if isinstance(matcher, Glob) else [matcher]
    for single in singles:
        if not any(single.matches(layer.name, layer.module_type) for layer in layers):
            raise ValueError(
                f"'{single}' matches no layer of this {type(model).__name__}{_hint(single, model, layers)}"
            )
    return matcher


# ---- blocks ----------------------------------------------------------------------------------------


def _block_paths(wanted: Blocks, model: nn.Module, layers: Sequence[Layer], blocks: str | None) -> tuple[str, ...]:
    chosen: list[str] = []
    for stack, children in _stacks(model, layers, blocks).items():
        if wanted.count > len(children):
            raise ValueError(f"'{wanted.end} {wanted.count} blocks': {stack or 'the model'} has {len(children)}")
        chosen += children[: wanted.count] if wanted.end == "first" else children[-wanted.count :]
    return tuple(chosen)


def _stacks(model: nn.Module, layers: Sequence[Layer], blocks: str | None) -> dict[str, list[str]]:
    """Paths of blocks by the path of the container they are in: one container, or those that ``blocks`` matches."""
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
            f"this {type(model).__name__} has no ModuleList, Sequential or numbered ModuleDict of modules of one type; "
            "say where its blocks are, as in blocks='model.layers'"
        )
    if len(best) > 1:
        raise ValueError(
            f"{' and '.join(best)} have {longest} blocks each; say which are meant, as in blocks={best[0]!r}"
        )
    return {best[0]: candidates[best[0]]}


def _is_stack(container: nn.Module) -> bool:
    """Whether the children follow each other. The keys of a ModuleDict that does (torchtitan's) are numbers."""
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
        return ", which has no nn.Linear and no module with roles"
    if isinstance(matcher, Glob):
        pattern = matcher.patterns[0]
        for known, others in other_paths(model).items():
            for path in others:
                if fnmatchcase(path, pattern) and any(layer.name == known for layer in layers):
                    return f": {path} is the layer {known} under another name, and rules go by the first: '{known}'"
        containers = [path for path, _ in model.named_modules() if path and fnmatchcase(path, pattern)]
        if containers:
            return f": {containers[0]} is not a layer; '{pattern}.*' is for the layers inside"
        return _near(pattern, [layer.name for layer in layers])
    return f"; module types are {', '.join(sorted({layer.module_type for layer in layers}))}"


def _near(pattern: str, names: Sequence[str]) -> str:
    """The names closest to a pattern. ``*.head`` is compared with as many last parts of a name as it has."""
    ending = pattern.removeprefix("*.") if pattern.startswith("*.") else None

    def similarity(name: str) -> float:
        if ending is not None:
            name = ".".join(name.split(".")[-(ending.count(".") + 1) :])
        return difflib.SequenceMatcher(None, ending or pattern, name).ratio()

    ranked = sorted(names, key=similarity, reverse=True)
    near = [name for name in ranked if similarity(name) >= 0.5][:3]
    return (
        f"; near misses: {', '.join(near)}"
        if near
        else f"; layers are {', '.join(names[:5])}" + ", ..." * (len(names) > 5)
    )


# ---- names -----------------------------------------------------------------------------------------


def check_names(model: nn.Module) -> None:
    """Raise if a module with roles goes by another name than its path: rules would pass it by."""
    for path, module in model.named_modules():
        name = getattr(module, "name", None)
        if path and hasattr(module, "get_quantizer_roles") and name != path:
            raise ValueError(
                f"{type(module).__name__} at {path!r} is called {name!r}, so rules for {path!r} would not reach it; "
                "crossgrain.nn.name_layers(model) names all modules that have no name by their paths"
            )
