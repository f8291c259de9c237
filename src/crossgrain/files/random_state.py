"""The random number generators of a process: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch


def get_random_state() -> dict[str, Any]:
    """Tensors and numbers only."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on as when `get_random_state` was called; all or nothing."""
    before = get_random_state()
    try:
        _set(state)
    except Exception as error:
        _set(before)
        raise ValueError(f"this is no state of random number generators: {error}") from error


def _set(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
