"""Recipes as text in checkpoints.

The text of a `GemmRecipe` is its line. The text of a recipe class is JSON with all its options, so that environment
variables do not matter when it is read. Functions are written as ``module:name``. Reading a function imports its
module, which runs code, so this is done only on request, except for crossgrain's own factories.
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
    """Write a recipe as one line, from which `recipe_from_text` makes an equal recipe.

    Raises:
        ValueError: the recipe has an option that cannot be written as text, or is of another class.

    Examples:
        >>> text = cg.files.recipe_to_text(cg.recipe.MXFP8BlockScaling())
        >>> cg.files.recipe_from_text(text) == cg.recipe.MXFP8BlockScaling()
        True
    """
    if isinstance(recipe, GemmRecipe):
        return str(recipe)
    name = type(recipe).__name__
    if _CLASSES.get(name) is not type(recipe):
        raise ValueError(f"{name} is not one of crossgrain's recipe classes, so it cannot be written as text")
    options = {option: _to_plain(value, f"{name}: {option}") for option, value in recipe.options().items()}
    return json.dumps({"recipe": name, **options})


def recipe_from_text(text: str, *, import_functions: bool = False) -> Recipe:
    """Read a recipe that `recipe_to_text` has written.

    Args:
        text: the text.
        import_functions: import the modules of functions that the text names. This runs their code, so set it only
            for files that you trust.

    Raises:
        ValueError: the text is not a recipe, or it needs a function that may not or cannot be imported.

    Examples:
        >>> recipe = cg.GemmRecipe.load("mxfp8; head: hp")
        >>> cg.files.recipe_from_text(cg.files.recipe_to_text(recipe)) == recipe
        True
    """
    if not text.lstrip().startswith("{"):
        return GemmRecipe.load(text)
    try:
        content = json.loads(text)
        cls = _CLASSES[content.pop("recipe")]
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"this is not the text of a recipe: {text[:200]!r}") from error
    options = {option: _from_plain(value, import_functions) for option, value in content.items()}
    arguments = {field.name for field in fields(cls) if field.init}
    for option, value in options.items():
        _check_type(cls, option, value)
    try:
        recipe: Recipe = cls(**{option: value for option, value in options.items() if option in arguments})
    except (AssertionError, TypeError) as error:
        raise ValueError(f"this is not the text of a {cls.__name__}: {error}") from error
    unknown = options.keys() - recipe.options().keys()
    settable = {option for option in unknown if isinstance(getattr(cls, option, None), QParams)}
    if unknown - settable:
        raise ValueError(f"{cls.__name__} has no option {', '.join(sorted(unknown - settable))}")
    for option in options.keys() - arguments:
        setattr(recipe, option, options[option])
    return recipe


def _check_type(cls: type[Any], option: str, value: Any) -> None:
    """Raise if a value is of another type than the default of its option."""
    default = getattr(cls, option, None)
    kind: Any = next((kind for kind in (bool, int, FP8Format, QParams, MMParams) if isinstance(default, kind)), object)
    if not isinstance(value, kind) or isinstance(value, list) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{cls.__name__}: {option} cannot be {value!r}")


def _to_plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FP8Format):
        return {"Format": value.name}
    if isinstance(value, QParams | MMParams):
        return {type(value).__name__: asdict(value)}
    if callable(value):
        return {"function": _path_of(value, where)}
    raise ValueError(f"{where} is a {type(value).__name__}, which cannot be written as text")


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
        raise ValueError(f"this is not the value of an option of a recipe: {value!r}") from error
    return _function_at(module, name, import_functions)


def _path_of(function: Callable[..., Any], where: str) -> str:
    """``module:name`` of a function that is defined at the top of a module."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found = getattr(sys.modules.get(module or ""), name or "", None)
    if found is not function:
        raise ValueError(
            f"{where} is {function!r}, which cannot be found by its name at module scope. Recipes are written as text, "
            "so their functions must be defined at the top of a module (no lambda, closure, partial or method)"
        )
    return f"{module}:{name}"


def _function_at(module: str, name: str, import_functions: bool) -> Any:
    if module not in _OWN_FACTORIES and not import_functions:
        raise ValueError(
            f"this recipe needs the function {module}:{name}. Importing its module runs its code: pass "
            "import_functions=True if you trust the file"
        )
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"this recipe needs the function {module}:{name}, which was not found: {error}") from error
    if not callable(function):
        raise ValueError(
            f"this recipe needs the function {module}:{name}, but that is a {type(function).__name__}, not a function"
        )
    return function
