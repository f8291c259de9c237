"""Which names of crossgrain are public, and on which page of the reference each one stands."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import crossgrain

# The packages that users may import from, with the title of their page, in the order of a reader's needs. Names of
# other packages are public only if ``crossgrain`` itself has them.
PACKAGES = {
    "convert": "Converting models",
    "recipe": "Recipes",
    "nn": "Modules",
    "ops": "Operations",
    "optim": "Optimizers",
    "files": "Checkpoints",
    "export": "Export",
    "offload": "Offloading",
    "distributed": "Distributed",
    "lab": "The lab",
    "gpt": "The small GPT",
    "planning": "Planning",
    "integrations": "Training programs",
    "compat": "Transformer Engine",
    "formats": "Formats",
    "quantizers": "Quantizers and tensors",
    "runtime": "Settings and backends",
}
# Pages that explain a package and show it at work.
GUIDES = {
    "convert": ("how-to/convert", "how-to/schedules", "reference/models"),
    "recipe": ("reference/recipes", "start/first-recipe"),
    "nn": ("reference/linear", "reference/modules", "reference/attention", "how-to/recompute"),
    "ops": ("reference/ops",),
    "optim": ("how-to/optimizers", "tutorials/fsdp2"),
    "files": ("how-to/checkpoints",),
    "export": ("how-to/export", "tutorials/export"),
    "offload": ("how-to/offload",),
    "distributed": ("how-to/distributed", "how-to/tensor_parallel", "tutorials/fsdp2"),
    "lab": ("how-to/lab", "how-to/inspect", "how-to/replay", "tutorials/choose_recipe", "tutorials/divergence"),
    "gpt": ("tutorials/choose_recipe",),
    "planning": ("how-to/planning",),
    "integrations": ("how-to/integrations", "tutorials/llama"),
    "compat": ("how-to/transformer_engine", "tutorials/transformer_engine"),
    "formats": ("reference/formats", "tutorials/add_format"),
    "quantizers": ("reference/tensors", "explanation/two-planes"),
    "runtime": ("reference/environment", "explanation/speed"),
}
# Rooms without a page of their own: where what ``crossgrain`` has of them is described.
_PAGE_OF = {"planes": "quantizers", "tensor": "quantizers", "kernels": "runtime"}
# Without ``__all__``: modules for programs that may not be installed.
INTEGRATIONS = ("transformers", "lightning", "accelerate", "torchtitan")


@dataclass(frozen=True)
class Name:
    """A public name.

    Attributes:
        path: the shortest way to write it: ``crossgrain.Linear``.
        source: where the documentation tool finds it.
        page: the package whose page has it.
        value: what it is.
    """

    path: str
    source: str
    page: str
    value: Any

    @property
    def is_data(self) -> bool:
        """Whether it is a value, which has no docstring of its own."""
        if self.path == "crossgrain.settings":
            return False
        return not (isinstance(self.value, ModuleType) or callable(self.value))

    @property
    def summary(self) -> str:
        """The first line of its docstring; for plain data, what kind of data it is."""
        if self.is_data:
            return f"data: {type(self.value).__name__}"
        return (inspect.getdoc(self.value) or "").partition("\n")[0]


def _page_of(value: Any, package: str) -> str:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    parts = module.split(".")
    room = parts[1] if parts[0] == "crossgrain" and len(parts) > 1 else package
    room = _PAGE_OF.get(room, room)
    return room if room in PACKAGES else package


def _source(path: str, value: Any) -> str:
    """The path itself; but where a function has the name of the package it lies in, the place of its definition."""
    parts = path.split(".")
    hidden = len(parts) == 2 and parts[1] in PACKAGES and not isinstance(value, ModuleType)
    if hidden:
        return f"{value.__module__}.{value.__qualname__}"
    return "crossgrain.runtime.settings.Settings" if path == "crossgrain.settings" else path


def public_names() -> list[Name]:
    """All public names, each one once, under its shortest path."""
    found: dict[str, Name] = {}
    by_identity: set[int] = set()
    for package in ("", *PACKAGES):
        module = importlib.import_module(f"crossgrain.{package}") if package else crossgrain
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            path = f"crossgrain.{package}.{name}" if package else f"crossgrain.{name}"
            if id(value) in by_identity and callable(value):
                continue
            if isinstance(value, ModuleType) and path.removeprefix("crossgrain.") in PACKAGES:
                continue  # it has a page
            by_identity.add(id(value))
            found[path] = Name(path, _source(path, value), _page_of(value, package or "runtime"), value)
    return list(found.values())
