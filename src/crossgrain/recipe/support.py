"""Which recipes are available, which one is the default, and helpers that read the options of a recipe.

Formats are emulated on machines without a GPU, so every recipe is available. In strict mode the answers are those of
Transformer Engine for a GPU of ``settings.compute_capability``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..formats.dtypes import DType, TE_DType_To_Torch
from ..runtime.settings import get_device_compute_capability, settings
from .base import Recipe
from .blockwise import MXFP8BlockScaling
from .params import FP8Format
from .per_tensor import DelayedScaling, Float8CurrentScaling

Support = tuple[bool, str]


def _supported(what: str, at_least: tuple[int, int], below: tuple[int, int] | None = None) -> Support:
    capability = get_device_compute_capability()
    if not settings.strict or (capability >= at_least and (below is None or capability < below)):
        return True, ""
    limits = f"{at_least[0]}.{at_least[1]} or higher" + (f" and below {below[0]}.{below[1]}" if below else "")
    return False, (
        f"strict mode: {what} needs compute capability {limits}, but settings.compute_capability is "
        f"{capability[0]}.{capability[1]}"
    )


def check_fp8_support() -> Support:
    """``(available, why not)`` for FP8 with one scale per tensor."""
    return _supported("FP8", (8, 9))


def check_mxfp8_support() -> Support:
    """``(available, why not)`` for MXFP8."""
    return _supported("MXFP8", (10, 0), below=(12, 0))


def check_fp8_block_scaling_support() -> Support:
    """``(available, why not)`` for FP8 block scaling."""
    return _supported("FP8 block scaling", (9, 0))


def check_nvfp4_support() -> Support:
    """``(available, why not)`` for NVFP4."""
    return _supported("NVFP4", (10, 0))


def is_fp8_available(return_reason: bool = False) -> bool | Support:
    """Whether FP8 with one scale per tensor is available: always, unless strict mode has the rules of another GPU.

    Args:
        return_reason: return a pair, ``(available, why not)``.

    Examples:
        >>> cg.is_fp8_available()
        True
    """
    return check_fp8_support() if return_reason else check_fp8_support()[0]


def is_mxfp8_available(return_reason: bool = False) -> bool | Support:
    """Whether MXFP8 is available: always, unless strict mode has the rules of another GPU.

    Args:
        return_reason: return a pair, ``(available, why not)``.

    Examples:
        >>> cg.is_mxfp8_available()
        True
    """
    return check_mxfp8_support() if return_reason else check_mxfp8_support()[0]


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | Support:
    """Whether FP8 block scaling is available: always, unless strict mode has the rules of another GPU.

    Args:
        return_reason: return a pair, ``(available, why not)``.

    Examples:
        >>> cg.is_fp8_block_scaling_available()
        True
    """
    return check_fp8_block_scaling_support() if return_reason else check_fp8_block_scaling_support()[0]


def is_nvfp4_available(return_reason: bool = False) -> bool | Support:
    """Whether NVFP4 is available: always, unless strict mode has the rules of another GPU.

    Args:
        return_reason: return a pair, ``(available, why not)``.

    Examples:
        >>> cg.is_nvfp4_available()
        True
    """
    return check_nvfp4_support() if return_reason else check_nvfp4_support()[0]


def check_recipe_support(recipe: Recipe) -> None:
    """Raise RuntimeError if a recipe is not available. Of a custom recipe only FP8 is checked, not its quantizers.

    Examples:
        >>> cg.recipe.check_recipe_support(cg.recipe.MXFP8BlockScaling())  # available
    """
    if recipe.mxfp8():
        supported, reason = check_mxfp8_support()
    elif recipe.nvfp4():
        supported, reason = check_nvfp4_support()
    elif recipe.float8_block_scaling():
        supported, reason = check_fp8_block_scaling_support()
    else:
        supported, reason = check_fp8_support()
    if not supported:
        raise RuntimeError(f"{type(recipe).__name__}: {reason}")


def get_default_recipe() -> Recipe:
    """The recipe of an autocast without a recipe: it depends on ``settings.compute_capability``, as on a GPU.

    Below 10.0 it is `DelayedScaling`, from 10.0 on `MXFP8BlockScaling` (the case by default), and from 12.0 on
    `Float8CurrentScaling`.

    Examples:
        >>> type(cg.get_default_recipe())
        <class 'crossgrain.recipe.blockwise.MXFP8BlockScaling'>
    """
    capability = get_device_compute_capability()
    if capability >= (12, 0):
        return Float8CurrentScaling()
    return MXFP8BlockScaling() if capability >= (10, 0) else DelayedScaling()


get_default_fp8_recipe = get_default_recipe


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The multiple to which the rows of groups are padded. For a custom recipe it is ``quantization_alignment``.

    Examples:
        >>> cg.recipe.get_align_size_for_quantization(cg.recipe.MXFP8BlockScaling())
        32
    """
    if recipe.custom():
        alignment: int = recipe.quantization_alignment  # type: ignore[attr-defined]
        return alignment
    if recipe.mxfp8():
        return 32
    return 128 if recipe.nvfp4() else 16


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """The FP8 type of forward tensors, or with ``fprop_tensor=False`` of backward tensors.

    Examples:
        >>> cg.recipe.get_fp8_te_dtype(cg.recipe.DelayedScaling()).name  # E4M3 in forward, E5M2 in backward
        'kFloat8E4M3'
    """
    fmt: Any = fp8_recipe.fp8_format  # type: ignore[attr-defined]
    if fmt is FP8Format.E4M3 or (fmt is FP8Format.HYBRID and fprop_tensor):
        return DType.kFloat8E4M3
    return DType.kFloat8E5M2


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The FP8 dtype of torch for forward or backward tensors.

    Examples:
        >>> cg.recipe.get_fp8_torch_dtype(cg.recipe.DelayedScaling(), fprop_tensor=False)
        torch.float8_e5m2
    """
    return TE_DType_To_Torch[get_fp8_te_dtype(fp8_recipe, fprop_tensor)]


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """The largest finite number of the FP8 type of forward or backward tensors.

    Examples:
        >>> cg.recipe.get_fp8_max(cg.recipe.DelayedScaling())
        448.0
    """
    return get_fp8_te_dtype(fp8_recipe, fprop_tensor).element.max


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """The FP4 type of a recipe, which is always E2M1.

    Examples:
        >>> cg.recipe.get_fp4_te_dtype(cg.recipe.NVFP4BlockScaling()).name
        'kFloat4E2M1'
    """
    fmt: Any = fp4_recipe.fp4_format  # type: ignore[attr-defined]
    if fmt is not FP8Format.E2M1:
        raise ValueError(f"fp4_format must be FP8Format.E2M1, got {fmt!r}")
    return DType.kFloat4E2M1
