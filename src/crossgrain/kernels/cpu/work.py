"""`Work`: one call of a kernel, with slots for the arguments that are known only when it is called.

Everything else - strides, sizes, tags - follows from the formats and the shape. So a call can be prepared once for all
matrices of a shape (`plans`), and is the same for one matrix and for groups of rows, where slots are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...planes import ROWWISE
from ..target import Target
from .elements import INFINITY_BITS
from .places import Ints, Numbers, Place, place_of
from .programs import REFUSED
from .runtime import Arguments, run_kernel
from .support import (
    NO_STREAM,
    Seed,
    Stream,
    factor_for_kernels,
    global_scales,
    keys_of,
    scales_of_each_row,
    scratch,
    write_tensor_scale,
)

Chosen = tuple[Target | None, ...]  # the targets of one call, in the order in which its encoder expects them


class Slot(NamedTuple):
    """An argument that is known only when a kernel is called.

    Attributes:
        kind: the name of the argument: a field of `TargetSlots`, or that of one of the slots below.
        target: the index of the target in `Chosen`.
    """

    kind: str
    target: int = 0


FIRST, LAST = Slot("first"), Slot("last")  # the range of steps of a thread
SCRATCH = Slot("scratch")  # memory of the thread
_OF_A_THREAD = (FIRST, LAST, SCRATCH)


class TargetSlots(NamedTuple):
    """The slots of a target."""

    x: Slot  # the matrix
    height: Slot
    codes: Slot
    codes_step: Slot  # bytes from one row of the operand to the next
    scales: Slot
    scales_step: Slot
    encode: Slot  # the global scales: one number, or one for each row if the format has an amax per row
    decode: Slot
    each_encode: Slot  # the global scales and the amax, once for each row of the operand
    each_decode: Slot
    each_amax: Slot
    key0: Slot  # of stochastic rounding
    key1: Slot
    factor: Slot  # the scale by which a per-tensor format multiplies

    @staticmethod
    def of(target: int) -> TargetSlots:
        return TargetSlots(*(Slot(kind, target) for kind in TargetSlots._fields))


class Work(NamedTuple):
    """One call of a kernel.

    Attributes:
        kernel: the kernel. It returns the bits of the largest magnitude that it has seen.
        arguments: numbers, tags and slots.
        steps: the number of steps, which threads can share, for a number of rows.
        scratch: bytes of memory that each thread needs.
        refuses_nan: if the kernel sees a NaN, what it has written is wrong, and the reference has to do it.
    """

    kernel: Any
    arguments: Arguments
    steps: Callable[[Ints], Ints]
    scratch: int = 0
    refuses_nan: bool = False


def stream_slots(target: Target, slots: TargetSlots) -> Stream:
    """The random stream of a plane: two keys (of each group), the first counter, and the counters of a row.

    A row is one of the matrix for rowwise planes, and four of them for columnwise planes.
    """
    if not target.encoding.stochastic:
        return NO_STREAM
    direction = target.plane.direction
    top, left, width = target.within or (0, 0, target.plane.shape[1])
    step = -(-width // 4) if direction is ROWWISE else width
    origin = top * step + left // 4 if direction is ROWWISE else top // 4 * step + left
    return slots.key0, slots.key1, origin, step


def run_work(work: Work, x: Tensor, chosen: Chosen, seed: Seed) -> int:
    """Run a kernel for targets with measured amaxes. Returns the bits of the largest magnitude, or REFUSED."""
    values = _Values(x, chosen, seed)
    given = [values[each] if type(each) is Slot else each for each in work.arguments]
    places = [(i, each) for i, each in enumerate(work.arguments) if type(each) is Slot and each in _OF_A_THREAD]
    held: list[Tensor] = []  # scratch memory: a signal's handler may make a thread need more

    def arguments(first: Ints, last: Ints) -> Arguments:
        mine = list(given)
        for i, slot in places:
            if slot == SCRATCH:
                memory = scratch(work.scratch)
                held.append(memory)
                mine[i] = memory.data_ptr()
            else:
                mine[i] = first if slot == FIRST else last
        return tuple(mine)

    steps = work.steps(values[TargetSlots.of(values.first).height])
    bits: int = max(run_kernel(work.kernel, arguments, steps, x.numel(), (chosen, values)), default=0)
    if work.refuses_nan and bits > INFINITY_BITS:
        return REFUSED
    for target in chosen:
        if target is not None:
            _finish(target)
    return bits


def _finish(target: Target) -> None:
    """Write what a plane has beside codes and block scales: the amax and the per-tensor scale."""
    if target.amax is not None:
        groups = getattr(target, "groups", None)
        amax = target.plane.amax if groups is None else groups.amax
        if amax is not None:
            amax.copy_(target.amax)
    if target.plane.format.block is None:
        write_tensor_scale(target)


class _Values:
    """The values of slots, for one matrix or for groups of rows. It owns the memory that they are addresses of."""

    def __init__(self, x: Tensor, chosen: Chosen, seed: Seed) -> None:
        self.x, self.chosen, self.seed = x, chosen, seed
        self.first = next(at for at, target in enumerate(chosen) if target is not None)
        self.found: dict[tuple[str, int], Any] = {}

    def __getitem__(self, slot: Slot) -> Any:
        if slot in _OF_A_THREAD:
            return slot
        target = self.chosen[slot.target]
        assert target is not None
        if slot.kind in Place._fields:
            return getattr(self._once("place", slot, lambda: place_of(target, self.x)), slot.kind)
        if slot.kind in ("encode", "decode"):
            pair: Sequence[Numbers] = self._once("scales", slot, lambda: global_scales(target))
            return pair[slot.kind == "decode"].address
        if slot.kind.startswith("each_"):
            each = self._once("each", slot, lambda: scales_of_each_row(target))
            return each[("each_encode", "each_decode", "each_amax").index(slot.kind)].address
        if slot.kind == "factor":
            return factor_for_kernels(target)
        keys = self._once("keys", slot, lambda: keys_of(self.seed, target))
        return keys[slot.kind == "key1"]

    def _once(self, what: str, slot: Slot, make: Callable[[], Any]) -> Any:
        key = what, slot.target
        if key not in self.found:
            self.found[key] = make()
        return self.found[key]
