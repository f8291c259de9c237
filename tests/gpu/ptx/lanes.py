"""The lanes that execute an instruction together."""

from functools import cached_property

import numpy as np

from .values import Array


class Lanes:
    """All lanes of a wave, or those at ``index``, in ascending order."""

    def __init__(self, total: int, index: Array | None = None) -> None:
        self.total = total
        self.index = None if index is not None and len(index) == total else index

    @property
    def count(self) -> int:
        """How many lanes."""
        return self.total if self.index is None else len(self.index)

    @cached_property
    def numbers(self) -> Array:
        """Their places in the wave."""
        return np.arange(self.total) if self.index is None else self.index

    @cached_property
    def warps(self) -> int:
        """How many warps have at least one of the lanes."""
        return self.total // 32 if self.index is None else len(np.unique(self.index >> 5))

    def take(self, array: Array) -> Array:
        """The part of an array over all lanes that belongs to these."""
        return array if self.index is None or array.ndim == 0 else array[self.index]

    def only(self, chosen: Array) -> "Lanes":
        """Those for which ``chosen``, with a truth value for each of these lanes, is true."""
        if chosen.ndim == 0:
            return self if chosen else Lanes(self.total, np.zeros(0, np.int64))
        return self if chosen.all() else Lanes(self.total, self.numbers[chosen])

    def spread(self, array: Array) -> Array:
        """An array with one number for each of these lanes, also of a number for all of them."""
        return np.broadcast_to(array, (self.count,)) if array.ndim == 0 else array

    def and_also(self, other: "Lanes") -> "Lanes":
        """Both together; they have none in common."""
        return Lanes(self.total, np.sort(np.concatenate((self.numbers, other.numbers))))
