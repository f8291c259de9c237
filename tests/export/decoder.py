"""Decode exported tensors, written from the descriptions of the layouts and sharing nothing with crossgrain."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Two codes a byte, the low half first, as numbers."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    return E2M1[codes.reshape(*packed.shape[:-1], -1)]


def e4m3(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e8m0(tensor: torch.Tensor) -> np.ndarray:
    return np.exp2(tensor.numpy().astype(np.float64) - 127).astype(np.float32)


def spread(scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


def compressed(stored: dict[str, torch.Tensor], name: str, block: tuple[int, int] | None = None) -> np.ndarray:
    """A weight in the layout of compressed-tensors; ``block`` of FP8 with blocks."""
    scales = stored[f"{name}_scale"]
    if f"{name}_packed" in stored:
        numbers = nibbles(stored[f"{name}_packed"].numpy())
        if f"{name}_global_scale" in stored:
            return numbers * spread(e4m3(scales) / stored[f"{name}_global_scale"].numpy(), numbers.shape, (1, 16))
        return numbers * spread(e8m0(scales), numbers.shape, (1, 32))
    numbers = e4m3(stored[name])
    if scales.dtype == torch.uint8:
        return numbers * spread(e8m0(scales), numbers.shape, (1, 32))
    return numbers * (scales.numpy() if block is None else spread(scales.numpy(), numbers.shape, block))


def modelopt(stored: dict[str, torch.Tensor], name: str) -> np.ndarray:
    if f"{name}_scale_2" in stored:
        numbers = nibbles(stored[name].numpy())
        scales = e4m3(stored[f"{name}_scale"]) * stored[f"{name}_scale_2"].numpy()
        return numbers * spread(scales, numbers.shape, (1, 16))
    return e4m3(stored[name]) * stored[f"{name}_scale"].numpy()


def gpt_oss(stored: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """A stack of experts [experts, out, in]."""
    blocks, scales = stored[f"{name}_blocks"].numpy(), stored[f"{name}_scales"]
    numbers = nibbles(blocks) * e8m0(scales)[..., None]
    return numbers.reshape(*blocks.shape[:2], -1)
