"""Recipes as text that travels with checkpoints.

A `GemmRecipe` is its line; the recipe classes are JSON with every option, so that the environment in which
a file is read does not matter. Functions travel as ``module:name``. Reading one back imports that module,
which runs its code, so it is done only on request, except for crossgrain's own factories.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from .base import Recipe
from .blockwise import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from .custom import CustomRecipe
from .gemm_recipe import GemmRecipe
from .params import FP8Format, MMParams, QParams
from .per_tensor import DelayedScaling, Float8CurrentScaling

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        DelayedScaling,
        Float8CurrentScaling,
        MXFP8BlockScaling,
        Float8BlockScaling,
        NVFP4BlockScaling,
        CustomRecipe,
    )
}
_PARAMS: dict[str, type[Any]] = {"QParams": QParams, "MMParams": MMParams}
_OWN_FACTORIES = ("crossgrain.recipe.factories", "crossgrain.recipe.zoo")


def recipe_to_text(recipe: Recipe) -> str:
    """One line from which `recipe_from_text` makes an equal recipe, or an error that says what cannot travel."""
    if isinstance(recipe, GemmRecipe):
        return str(recipe)
    name = type(recipe).__name__
    if _CLASSES.get(name) is not type(recipe):
        raise ValueError(f"{name} is not one of crossgrain's recipe classes, so it has no text")
    options = {option: _to_plain(value, f"{name}: {option}") for option, value in recipe.options().items()}
    return json.dumps({"recipe": name, **options})


def recipe_from_text(text: str, *, import_functions: bool = False) -> Recipe:
    """The recipe of `recipe_to_text`. ``import_functions``: you trust the text to name modules to import."""
    if not text.lstrip().startswith("{"):
        return GemmRecipe.load(text)
    try:
        content = json.loads(text)
        cls = _CLASSES[content.pop("recipe")]
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"this is not the text of a recipe: {text[:200]!r}") from error
    options = {option: _from_plain(value, import_functions) for option, value in content.items()}
    arguments = {field.name for field in fields(cls) if field.init}
    recipe: Recipe = cls(**{option: value for option, value in options.items() if option in arguments})
    unknown = options.keys() - recipe.options().keys()
    settable = {option for option in unknown if isinstance(getattr(cls, option, None), QParams)}
    if unknown - settable:
        raise ValueError(f"{cls.__name__} has no option {', '.join(sorted(unknown - settable))}")
    for option in options.keys() - arguments:
        setattr(recipe, option, options[option])
    return recipe


def _to_plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FP8Format):
        return {"Format": value.name}
    if isinstance(value, QParams | MMParams):
        return {type(value).__name__: asdict(value)}
    if callable(value):
        return {"function": _path_of(value, where)}
    raise ValueError(f"{where} is a {type(value).__name__}, which cannot travel as text")


def _from_plain(value: Any, import_functions: bool) -> Any:
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        if kind == "Format":
            return FP8Format[content]
        if kind in _PARAMS:
            return _PARAMS[kind](**content)
        if kind == "function":
            module, _, name = content.partition(":")
        else:
            raise KeyError(kind)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"this is no option of a recipe: {value!r}") from error
    return _function_at(module, name, import_functions)


def _path_of(function: Callable[..., Any], where: str) -> str:
    """``module:name`` of a function at module scope."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found = getattr(sys.modules.get(module or ""), name or "", None)
    if found is not function:
        raise ValueError(
            f"{where} is {function!r}, which cannot be found by a name at module scope: a recipe travels as text, so "
            "its functions have to be defined at the top of a module (no lambda, closure, partial or method)"
        )
    return f"{module}:{name}"


def _function_at(module: str, name: str, import_functions: bool) -> Any:
    if module not in _OWN_FACTORIES and not import_functions:
        raise ValueError(
            f"this recipe needs the function {module}:{name}, and importing a module runs its code: pass "
            "import_functions=True if you trust the file"
        )
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"this recipe needs the function {module}:{name}, which is not there: {error}") from error
    if not callable(function):
        raise ValueError(f"this recipe needs the function {module}:{name}, which is a {type(function).__name__}")
    return function
