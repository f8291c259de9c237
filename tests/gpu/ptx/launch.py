"""A launch: arguments to parameters, the grid in waves of blocks, and the arrays of the caller changed at the end."""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .counting import Report
from .errors import PtxError
from .memory import GlobalMemory, Pointer
from .scheduler import Code, Scheduler
from .source import Parameter, parse
from .wave import Wave

Argument = np.ndarray[Any, Any] | Pointer | int | float | None
_LANES = 1 << 15  # of a wave: enough for numpy, little enough for caches


def run(
    ptx: str,
    grid: tuple[int, ...],
    arguments: Sequence[Argument],
    shared_bytes: int,
    *,
    allow_fma: bool = False,
    most_steps: int = 1 << 18,
    raise_races: bool = True,
) -> Report:
    """Run a kernel.

    Args:
        ptx: A module with one kernel.
        grid: Blocks in up to three dimensions.
        arguments: Arrays, which are global buffers and changed in place; a Pointer into one; None for a null pointer;
            ints and floats. Pointers that Triton adds at the end (scratch memory) may be left out, and are null.
        shared_bytes: The size of the dynamic shared memory.
        allow_fma: Whether fused multiply-adds are run; they are exact, but rarely what a reference does.
        most_steps: After so many steps of a wave of blocks, it is taken for one that never ends.
        raise_races: Whether a race is an error; otherwise all are listed in the report.

    Returns:
        Counts of instructions, sectors and bank conflicts.

    Raises:
        PtxError: The kernel does what it must not, or what the emulator does not know. No array is changed.
    """
    if np.float32(1e-40) * np.float32(0.5) == 0:
        raise PtxError("this process flushes subnormal numbers to zero, so its arithmetic is not that of PTX")
    code = _code(ptx, allow_fma)
    program = code.program
    if not 1 <= len(grid) <= 3 or min(grid) < 1:
        raise PtxError(f"a grid has one to three dimensions of at least one block, got {grid}")
    x, y, z = (*grid, 1, 1)[:3]
    report = Report(raise_races=raise_races)
    memory = GlobalMemory(arguments, program.threads, report.tell_race)
    parameters = _parameters(program.parameters, arguments, memory)
    blocks = x * y * z
    at_once = max(1, _LANES // program.threads)
    for first in range(0, blocks, at_once):
        number = min(at_once, blocks - first)
        wave = Wave(program, (x, y, z), first, number, parameters, memory, shared_bytes, report)
        Scheduler(code, wave, most_steps).run()
    memory.copy_back()
    return report


@lru_cache(maxsize=64)
def _code(ptx: str, allow_fma: bool) -> Code:
    return Code(parse(ptx), allow_fma)


def _parameters(
    parameters: tuple[Parameter, ...], arguments: Sequence[Argument], memory: GlobalMemory
) -> dict[str, int]:
    if len(arguments) > len(parameters):
        raise PtxError(f"{len(arguments)} arguments for {len(parameters)} parameters")
    if any(each.bits != 64 for each in parameters[len(arguments) :]):
        raise PtxError(f"only {len(arguments)} arguments for {len(parameters)} parameters, not all others are pointers")
    given = [*arguments, *[None] * (len(parameters) - len(arguments))]
    return {p.name: _raw(p, argument, memory) for p, argument in zip(parameters, given, strict=True)}


def _raw(parameter: Parameter, argument: Argument, memory: GlobalMemory) -> int:
    """The bits of an argument."""
    pointer = argument is None or isinstance(argument, np.ndarray | Pointer)
    if pointer and parameter.bits != 64:
        raise PtxError(f"{parameter.name} has {parameter.bits} bits and cannot be a pointer")
    if argument is None:
        return 0
    if isinstance(argument, np.ndarray | Pointer):
        return memory.address(argument)
    if isinstance(argument, float):
        if parameter.bits not in (32, 64):
            raise PtxError(f"{parameter.name} has {parameter.bits} bits and cannot be a float")
        single = parameter.bits == 32
        return int.from_bytes(struct.pack("<f" if single else "<d", argument), "little")
    if not -(1 << (parameter.bits - 1)) <= argument < 1 << parameter.bits:
        raise PtxError(f"{parameter.name} has {parameter.bits} bits: {argument} does not fit")
    return int(argument)
