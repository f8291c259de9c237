"""The names by which configurations know layers."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ...nn.base import QuantizedModule
from ...nn.linear_module import LinearModule
from ..adapters.debug_state import TEDebugState

GROUPED = "grouped_linear"


class LayerNames:
    """The names of layers in one session.

    A layer has the name that ``infer_and_assign_layer_names`` gave it; else its own name, in which the projections of
    attention are called as in Transformer Engine; else ``Layer_1``, ``Layer_2`` and so on. Parts are added: ``.fc1``
    and ``.fc2`` of an MLP, ``.gemm_0``, ``.gemm_1``, ... of a grouped layer.
    """

    def __init__(self) -> None:
        self._inferred: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._numbered: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[Any, tuple[str | None, list[str]]] = weakref.WeakKeyDictionary()
        self._theirs: Any = None

    def name_of(self, module: LinearModule, index: int) -> str:
        """The name of a linear layer of a module."""
        return self._names(module)[index]

    def groups_beside(self, module: LinearModule, index: int) -> list[str]:
        """The names of the other groups of the same grouped layer."""
        name = self.name_of(module, index)
        whole, mark, _ = name.rpartition(".gemm_")
        if not mark or module.linear_roles()[index].module_type != GROUPED:  # type: ignore[union-attr]
            return []
        return [other for other in self._names(module) if other != name and other.rpartition(".gemm_")[0] == whole]

    def _names(self, module: LinearModule) -> list[str]:
        known = self._known.get(module)
        if known is None or known[0] != module.name:
            known = self._known[module] = (module.name, self._made(module))
        return known[1]

    def _made(self, module: LinearModule) -> list[str]:
        own, inferred = module.name or "", self._inferred.get(module)
        if inferred is None and not own:
            if module not in self._numbered:
                self._numbered[module] = f"Layer_{TEDebugState.get_layer_count()}"
            inferred = self._numbered[module]
        names: list[str] = []
        for role in module.linear_roles():
            name = "" if role is None else role.name
            if inferred is not None:
                part = "" if role is None else role.layer.removeprefix(own).lstrip(".")
                name = f"{inferred}.{part}" if part else inferred
            if role is not None and role.module_type == GROUPED:
                name += f".gemm_{sum(each.rpartition('.gemm_')[0] == name for each in names)}"
            names.append(name)
        return names

    # ---- names that nvdlfw_inspect infers ------------------------------------------------------

    def follow_inference(self) -> None:
        """Take over the names that ``debug_api.infer_and_assign_layer_names`` gives, until `stop_following`.

        It writes them to ``name`` of every module, by which rules of recipes know the layers. So the old names are
        written back: with them, layers would have other formats.
        """
        import nvdlfw_inspect.api as debug_api

        self._theirs = infer = debug_api.infer_and_assign_layer_names

        def infer_and_assign_layer_names(model: Any) -> None:
            modules = [module for part in _roots(model) for module in part.modules()]
            own = {module: module.name for module in modules if isinstance(module, QuantizedModule)}
            infer(model)
            for module, name in own.items():
                if module.name is not None:
                    self._inferred[module] = module.name
                module.name = name
                self._known.pop(module, None)

        infer_and_assign_layer_names.__doc__ = infer.__doc__
        debug_api.infer_and_assign_layer_names = infer_and_assign_layer_names

    def stop_following(self) -> None:
        """Undo `follow_inference`."""
        import nvdlfw_inspect.api as debug_api

        if self._theirs is not None:
            debug_api.infer_and_assign_layer_names, self._theirs = self._theirs, None


def _roots(model: Any) -> list[nn.Module]:
    models = model if isinstance(model, list) else [model]
    return [each if isinstance(each, nn.Module) else each.module for each in models]
