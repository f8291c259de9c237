"""Random numbers that differ between parallel ranks where they must, and agree where they must."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .passes import same_seed


class CudaRNGStatesTracker:
    """Named states of torch's CPU generator; the name of the class is the field's.

    >>> tracker = CudaRNGStatesTracker()
    >>> tracker.add("model-parallel-rng", seed)       # another seed on each rank
    >>> with tracker.fork():                          # draws from that state, and goes on there next time
    ...     mask = torch.bernoulli(p)
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Tensor]:
        """Copies of the states by name."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take states from `get_states`."""
        self._states = {name: state.clone() for name, state in states.items()}

    def state_dict(self) -> dict[str, Any]:
        """States and seeds, for checkpoints."""
        return {"states": self.get_states(), "seeds": sorted(self._seeds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        seeds = {int(seed) for seed in state["seeds"]}
        self.set_states(state["states"])
        self._seeds = seeds

    def add(self, name: str, seed: int) -> None:
        """A state that begins at ``seed``. Neither the name nor the seed may have been added before."""
        if seed in self._seeds:
            raise ValueError(f"there is a state with the seed {seed} already")
        if name in self._states:
            raise ValueError(f"there is a state {name!r} already")
        self._seeds.add(seed)
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Inside, torch draws from the state ``name``; outside, as if nothing had been drawn."""
        if name not in self._states:
            raise KeyError(f"there is no state {name!r}; known: {', '.join(self._states) or 'none'}")
        outer = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


def draw_seed() -> int:
    """64 random bits from torch's default generator; the same ones in a recomputation in backward."""
    return same_seed(_drawn_seed)


def _drawn_seed() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None))
