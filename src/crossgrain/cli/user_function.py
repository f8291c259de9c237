"""Functions of users, which options name as ``module:function``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .imports import import_modules
from .output import fail


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Import a function; what goes wrong ends the program. The current directory counts.

    Args:
        name: ``module:function``.
        option: the option that names it, for messages.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise fail(f"{option} {name}: write it as module:function, like train:start", code=2)
    import_modules([module], option)
    found: Any = sys.modules[module]
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise fail(f"{option} {name}: {module} has no function {attribute!r}", code=2)
        found = getattr(found, part)
    if not callable(found):
        raise fail(f"{option} {name}: {attribute} is not a function but a {type(found).__name__}", code=2)
    function: Callable[..., Any] = found
    return function
