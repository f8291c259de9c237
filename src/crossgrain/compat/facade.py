"""`Facade`: a module whose names are those of other modules, where they are read, replaced and deleted."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

EVERYTHING = "*"


class Facade(ModuleType):
    """A module that has no contents of its own: its names refer to other modules.

    Reading, setting and deleting a name are passed on to the module that has it. So replacing a function here replaces
    it for everybody who looks it up there. Deleting a name that was set here restores the earlier value, because tools
    that patch modules temporarily undo it in that way.

    Args:
        name: dotted name of the module.
        names: maps a name to ``"module:attribute"``. The entry ``"*"`` is a list of modules that are searched, in
            order, for all other names.
        doc: docstring of the module.
    """

    def __init__(self, name: str, names: Mapping[str, Any], doc: str | None = None) -> None:
        super().__init__(name, doc)
        own = {key: value for key, value in names.items() if key != EVERYTHING and not isinstance(value, str)}
        elsewhere = {key: value for key, value in names.items() if key != EVERYTHING and isinstance(value, str)}
        vars(self).update(_elsewhere=elsewhere, _behind=tuple(names.get(EVERYTHING, ())), _replaced={}, **own)

    def _place(self, name: str) -> tuple[ModuleType, str] | None:
        """The module that has the name, and the attribute it has there; None if there is none."""
        if name in self._elsewhere:
            module, _, attribute = self._elsewhere[name].partition(":")
            return importlib.import_module(module), attribute
        if name.startswith("__"):
            return None
        behind = (importlib.import_module(module) for module in self._behind)
        return next(((module, name) for module in behind if hasattr(module, name)), None)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._public()
        place = self._place(name)
        if place is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(*place)

    def __setattr__(self, name: str, value: Any) -> None:
        place = None if name in vars(self) else self._place(name)
        if place is None:
            super().__setattr__(name, value)
            return
        earlier = self._replaced.setdefault(name, [])
        if earlier and earlier[-1] is value:
            earlier.pop()
        elif hasattr(*place):
            earlier.append(getattr(*place))
        setattr(*place, value)

    def __delattr__(self, name: str) -> None:
        place = None if name in vars(self) else self._place(name)
        if place is None:
            super().__delattr__(name)
        elif self._replaced.get(name):
            setattr(*place, self._replaced[name].pop())
        else:
            delattr(*place)

    def __dir__(self) -> Sequence[str]:
        behind = [name for module in self._behind for name in dir(importlib.import_module(module))]
        return sorted({*vars(self), *self._elsewhere, *(name for name in behind if not name.startswith("__"))})

    def _public(self) -> list[str]:
        behind = [
            name
            for module in map(importlib.import_module, self._behind)
            for name in getattr(module, "__all__", ())
            if hasattr(module, name)
        ]
        return sorted({name for name in (*vars(self), *self._elsewhere, *behind) if not name.startswith("_")})

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)
