"""Read and set the state of all random number generators of a process: torch, Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch


def get_random_state() -> dict[str, Any]:
    """The states of all generators, as tensors, numbers and strings only, so that they can be loaded safely."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put all generators into the states that `get_random_state` returned.

    Raises:
        ValueError: the states do not fit; then no generator has changed.
    """
    before = get_random_state()
    try:
        _set(state)
    except Exception as error:
        _set(before)
        raise ValueError(f"the saved states of the random number generators are invalid: {error}") from error


def _set(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
