"""Runs a wave: every lane has its own place in the program, and the lanes that are furthest behind go first.

Lanes at the same place run together. So lanes that took different branches meet again where the branches do, and loops
end for each lane in its own time. A barrier holds lanes back until all threads of their block stand at it. A thread
that has returned never comes: PTX does not say that a barrier would go on without it.
"""

import numpy as np

from .errors import PtxError
from .lanes import Lanes
from .products import products
from .registry import decode
from .source import DECLARATION, Immediate, Instruction, Program, Symbol
from .wave import Executor, Wave

_BARRIERS = tuple(
    f"{name}{scope}.sync{aligned}"
    for name in ("bar", "barrier")
    for scope in ("", ".cta")
    for aligned in ("", ".aligned")
)
_RETURNS = ("ret", "exit")
_BRANCHES = ("bra", "bra.uni")


class Code:
    """A program with what executes each instruction; branches, barriers and returns are left to the scheduler."""

    def __init__(self, program: Program, allow_fma: bool) -> None:
        self.program = program
        self.executors: list[Executor | None] = []
        exact = products(program)
        for each in program.instructions:
            control = _check_control(each, program)
            self.executors.append(None if control else decode(each, allow_fma or each in exact))


def _check_control(instruction: Instruction, program: Program) -> bool:
    """Whether the scheduler executes the instruction; its operands are checked."""
    operands = instruction.operands
    if instruction.opcode in _BRANCHES:
        good = len(operands) == 1 and isinstance(operands[0], Symbol) and operands[0].name in program.labels
    elif instruction.opcode in _BARRIERS:
        good = len(operands) == 1 and isinstance(operands[0], Immediate)
    elif instruction.opcode in (*_RETURNS, "trap"):
        good = not operands
    else:
        return False
    if not good:
        raise PtxError(f"this kind of {instruction.opcode} is not known: {instruction.text}")
    return True


class Scheduler:
    """One wave from its first instruction to its last."""

    def __init__(self, code: Code, wave: Wave, most_steps: int) -> None:
        self._code, self._wave = code, wave
        self._steps_left = most_steps
        self._ready: dict[int, Lanes] = {}  # place in the program -> lanes that stand there
        self._waiting: dict[int, Lanes] = {}  # barrier -> lanes that have come to it

    def run(self) -> None:
        """Run until all threads have returned."""
        self._arrive(0, Lanes(self._wave.total))
        with np.errstate(all="ignore"):
            while self._ready:
                at = min(self._ready)
                lanes = self._ready.pop(at)
                self._run_until(at, lanes, min(self._ready, default=None))
        for at, lanes in self._waiting.items():
            block = int(self._wave.block[lanes.numbers[0]])
            here = int((self._wave.block[lanes.numbers] == block).sum())
            raise PtxError(
                f"only {here} of {self._wave.program.threads} threads of a block come to the barrier: "
                f"{self._code.program.instructions[at].text} (instruction {at})"
            )

    def _run_until(self, at: int, lanes: Lanes, others: int | None) -> None:
        """Run lanes to where others stand, or to an instruction that parts or stops them."""
        while True:
            if at >= len(self._code.executors):
                raise PtxError("the program ends without a return")
            if not self._steps_left:
                raise PtxError("the program does not end: more steps than were allowed")
            self._steps_left -= 1
            instruction, executor = self._code.program.instructions[at], self._code.executors[at]
            if instruction.opcode != DECLARATION:
                self._wave.report.counts[instruction.opcode] += lanes.warps
            try:
                active = self._guarded(instruction, lanes)
                if executor is None:
                    self._control(instruction, at, lanes, active)
                    return
                if active.count:
                    executor(self._wave, active)
            except PtxError as error:
                raise PtxError(f"{error}: {instruction.text} (instruction {at})") from None
            at += 1
            if at == others:
                self._arrive(at, lanes)
                return

    def _guarded(self, instruction: Instruction, lanes: Lanes) -> Lanes:
        if instruction.guard is None:
            return lanes
        return lanes.only(self._wave.fetch(instruction.guard, 1, lanes).value != instruction.negated)

    def _control(self, instruction: Instruction, at: int, lanes: Lanes, active: Lanes) -> None:
        """Send active lanes where the instruction says, all others on."""
        if active.count < lanes.count:
            gone = np.isin(lanes.numbers, active.numbers, assume_unique=True)
            self._arrive(at + 1, Lanes(lanes.total, lanes.numbers[~gone]))
        if not active.count:
            return
        if instruction.opcode in _BRANCHES:
            target = instruction.operands[0]
            assert isinstance(target, Symbol)
            self._arrive(self._code.program.labels[target.name], active)
        elif instruction.opcode in _BARRIERS:
            self._wait(at, active)
        elif instruction.opcode == "trap":
            raise PtxError("the program traps")

    def _wait(self, at: int, lanes: Lanes) -> None:
        """Hold lanes back; let those of complete blocks go on."""
        if at in self._waiting:
            lanes = lanes.and_also(self._waiting.pop(at))
        block = self._wave.block[lanes.numbers]
        complete = np.bincount(block)[block] == self._wave.program.threads
        passed = lanes.only(complete)
        if passed.count:
            self._wave.pass_barrier(passed)
            self._arrive(at + 1, passed)
        if passed.count < lanes.count:
            self._waiting[at] = lanes.only(~complete)

    def _arrive(self, at: int, lanes: Lanes) -> None:
        there = self._ready.get(at)
        self._ready[at] = lanes if there is None else lanes.and_also(there)
