"""Layers that `convert` leaves in high precision unless it is asked for them: output heads, adapters and routers.

Published recipes keep them there: the head decides about every token, adapters are small and trained from zero, and a
router that is rounded sends tokens to other experts.
"""

from __future__ import annotations

from torch import nn

# Last parts of the paths of output heads; only outside of stacks of blocks.
HEADS = frozenset(
    {
        "classifier",
        "embed_out",
        "head",
        "heads",
        "lm_head",
        "output",
        "output_layer",
        "output_projection",
        "qa_outputs",
        "score",
    }
)
# Names of modules that are output heads as a whole, as transformers has them.
_HEAD_MODULES = frozenset({"classification_head", "classifier", "lm_head"})
KINDS = {"output head": "output heads", "router": "routers", "adapter": "adapters"}
"""What stays in high precision by default, with its plural."""

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "shared_experts_gate"})


def is_head_path(path: str) -> bool:
    """Whether a path is that of an output head."""
    *parents, last = path.split(".")
    if any(part.isdecimal() for part in parents):
        return False
    return last in HEADS or not _HEAD_MODULES.isdisjoint(parents)


def left_by_default(model: nn.Module) -> dict[str, str]:
    """The paths of modules that stay in high precision by default, with the kind of layer they are."""
    found: dict[str, str] = {}
    modules = dict(model.named_modules())
    embeddings = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    named_head = _named_head(model)
    for path, module in modules.items():
        if not path:
            continue
        linear = isinstance(module, nn.Linear)
        tied = linear and id(module.weight) in embeddings
        if module is named_head or tied or (linear and is_head_path(path)):
            found[path] = "output head"
        elif _is_router(path, module, modules):
            found[path] = "router"
        elif _is_adapter(path, modules):
            found[path] = "adapter"
    return found


def _named_head(model: nn.Module) -> nn.Module | None:
    """The output head that a model of transformers names itself."""
    getter = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
    except (AttributeError, NotImplementedError):  # models without a head
        return None
    return head if isinstance(head, nn.Module) else None


def _is_router(path: str, module: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """Whether a module chooses between experts that are beside it, or is a layer inside of one that does."""
    if not any(True for _ in module.parameters(recurse=False)):
        return False
    parts = path.split(".")
    for depth, name in enumerate(parts):
        if name in _ROUTERS and _is_beside_experts(name, modules[".".join(parts[:depth])]):
            return True
    return False


def _is_beside_experts(name: str, parent: nn.Module) -> bool:
    siblings = ((other, type(child).__name__) for other, child in parent.named_children() if other != name)
    return any("expert" in other or "Expert" in kind for other, kind in siblings)


def _is_adapter(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module is inside an adapter of peft, whose layers list the names of theirs."""
    parts = path.split(".")
    for depth in range(len(parts)):
        owner = modules[".".join(parts[:depth])]
        if parts[depth] in getattr(owner, "adapter_layer_names", ()):
            return True
    return False
