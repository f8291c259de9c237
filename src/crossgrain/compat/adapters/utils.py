"""Small helper functions of Transformer Engine: devices, dtypes, initialization, division."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...runtime.devices import accelerator, resolved_device
from ...runtime.settings import get_device_compute_capability, is_non_tn_fp8_gemm_supported

__all__ = [
    "SplitAlongDim",
    "assert_dim_for_fp8_exec",
    "attention_mask_func",
    "canonicalize_device",
    "canonicalize_dtype",
    "cast_if_needed",
    "ceil_div",
    "devices_match",
    "divide",
    "ensure_divisibility",
    "get_cudnn_version",
    "get_default_init_method",
    "get_device_compute_capability",
    "gpu_autocast_ctx",
    "init_method_constant",
    "init_method_normal",
    "is_bf16_available",
    "is_bf16_compatible",
    "is_non_tn_fp8_gemm_supported",
    "make_weak_ref",
    "requires_grad",
    "round_up_to_nearest_multiple",
    "scaled_init_method_normal",
    "split_tensor_along_dim",
]


def canonicalize_device(device: torch.device | str | int | None) -> torch.device:
    """Resolve a device. None is the default device; "cuda" is the current GPU, or the CPU if there is none."""
    resolved = resolved_device(device)
    needs_number = resolved.type == "cuda" and str(resolved) == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if needs_number else resolved


def devices_match(device1: torch.device | str | None, device2: torch.device | str | None) -> bool:
    """Whether both arguments mean the same device."""
    return canonicalize_device(device1) == canonicalize_device(device2)


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return ``dtype``, or torch's default dtype for None."""
    return torch.get_default_dtype() if dtype is None else dtype


def cast_if_needed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def gpu_autocast_ctx(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    """``torch.autocast`` for the device that "cuda" means here."""
    return torch.autocast(accelerator().type, *args, **kwargs)


def is_bf16_compatible() -> bool:
    return True


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Always True, or ``(True, "")`` with ``return_reason``."""
    return (True, "") if return_reason else True


def get_cudnn_version() -> tuple[int, int, int]:
    """Always (0, 0, 0): cuDNN is not used."""
    return (0, 0, 0)


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """An initialization with normal numbers of mean 0 and deviation ``sigma``."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def init_method_constant(value: float) -> Callable[[Tensor], Tensor]:
    return partial(torch.nn.init.constant_, val=value)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """An initialization with normal numbers of mean 0 and deviation ``sigma / sqrt(2 · num_layers)``."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def get_default_init_method() -> Callable[[Tensor], Tensor]:
    return init_method_normal(0.023)


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Set the scores of masked pairs to -10000, so that softmax gives them no weight."""
    return attention_scores.masked_fill(attention_mask, -10000.0)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def ensure_divisibility(numerator: int, denominator: int) -> None:
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Divide; raise if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    """Do nothing: any size can be multiplied here, because operands are padded."""


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into ``num_partitions`` equal parts."""
    parts = tensor.split(divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class SplitAlongDim:
    """``SplitAlongDim.apply(tensor, dim, size or sizes)`` splits a tensor like ``torch.split``."""

    @staticmethod
    def apply(mixed: Tensor, split_dim: int, split_size_or_sections: int | list[int] | tuple[int, ...]) -> Any:
        sizes = split_size_or_sections
        return torch.split(mixed, sizes if isinstance(sizes, int) else list(sizes), dim=split_dim)


def make_weak_ref(x: Any) -> Any:
    """Return ``x`` itself: weak references are only needed for CUDA graphs."""
    return x
