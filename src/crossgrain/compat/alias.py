"""`install`: make ``import transformer_engine`` find crossgrain in this process, and undo it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from .facade import Facade
from .tree import MODULES, ROOTS
from .version import VERSION

__all__ = ["VERSION", "install", "is_installed", "uninstall"]

_DISTRIBUTION = "transformer-engine"
_displaced: dict[str, ModuleType] = {}


def install(*, replace: bool = False) -> None:
    """Make ``import transformer_engine`` find crossgrain from now on, in this process.

    ``importlib.util.find_spec`` and ``importlib.metadata.version`` find it too. `uninstall` undoes it.

    Args:
        replace: hide a real Transformer Engine if there is one.

    Raises:
        RuntimeError: a real Transformer Engine is installed, and ``replace`` is False.

    Examples:
        >>> cg.compat.install()
        >>> import transformer_engine.pytorch as te
        >>> te.Linear is cg.Linear
        True
        >>> cg.compat.uninstall()
    """
    if is_installed():
        return
    real = _real_transformer_engine()
    if real is not None and not replace:
        raise RuntimeError(
            f"there is a Transformer Engine at {real}, which crossgrain would hide. "
            "To hide it, call install(replace=True), or use python -m crossgrain.te --replace"
        )
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        module = sys.modules.pop(name)
        if real is not None:
            _displaced[name] = module
    sys.modules.update(MODULES)
    sys.meta_path.insert(0, _finder)
    importlib.invalidate_caches()


def uninstall() -> None:
    """Undo `install`. Objects that were imported already stay usable.

    Examples:
        >>> cg.compat.install()
        >>> cg.compat.is_installed()
        True
        >>> cg.compat.uninstall()
    """
    if not is_installed():
        return
    sys.meta_path.remove(_finder)
    for name, module in MODULES.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    sys.modules.update(_displaced)
    _displaced.clear()


def is_installed() -> bool:
    """Whether ``import transformer_engine`` finds crossgrain because of `install`.

    Examples:
        >>> cg.compat.install()
        >>> cg.compat.is_installed()
        True
        >>> cg.compat.uninstall()
    """
    return _finder in sys.meta_path


def _real_transformer_engine() -> str | None:
    """The place of a Transformer Engine that is not crossgrain's; None if there is none."""
    for name in ROOTS:
        if name in sys.modules:
            spec, known = getattr(sys.modules[name], "__spec__", None), True
        else:
            spec = importlib.util.find_spec(name)
            known = spec is not None
        if known and not _is_ours(name, spec):
            return str(getattr(spec, "origin", None) or name)
    return None


def _is_ours(name: str, spec: Any) -> bool:
    """Whether a module is one of crossgrain's, or of the package ``crossgrain-te``."""
    if isinstance(sys.modules.get(name), Facade):
        return True
    origin = getattr(spec, "origin", None)
    source = Path(origin) if origin else None
    return source is not None and source.suffix == ".py" and "crossgrain.compat" in source.read_text(encoding="utf-8")


class _Distribution(importlib.metadata.Distribution):
    """The distribution that `importlib.metadata` reports for ``transformer-engine``."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {VERSION}\n",
            "top_level.txt": "\n".join(ROOTS),
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder:
    """Lets `importlib.metadata` find the distribution. The modules themselves are in ``sys.modules``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower().replace("_", "-").replace(".", "-") == _DISTRIBUTION:
            yield _Distribution()


_finder: Any = _Finder()
