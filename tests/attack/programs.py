"""Random programs: drawn from a seed, run against a model step by step, and shortened when they fail.

A `World` holds what a program works on, with what is expected of it, and has the actions. A step is the name of an
action and a seed, from which the action draws all its choices. So every list of steps is a program, also with steps
left out, and a failing program is shortened by leaving out steps as long as it fails in the same way. To make that
work well, choices do not depend on what other steps have made, wherever they can (`World.pick`).

Program number n is the same wherever it runs: ``--seed n --programs 1``.
"""

from __future__ import annotations

import random
import re
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import pytest
import torch

# What the library may raise when it refuses something; anything else is a mistake.
REFUSALS = (RuntimeError, ValueError, TypeError)

Something = TypeVar("Something")


class Step(NamedTuple):
    """One step: its number in the whole program, which also names what it makes; the action; and the seed of it."""

    number: int
    action: str
    seed: int


class World:
    """What a program works on. Subclasses add actions: methods whose name begins with ``do_``.

    Attributes:
        lengths: the smallest and the largest number of steps of a program.
        weights: how often an action is drawn, by name; 1 for those that are not named.
        draw: the random numbers of the step that runs.
        lines: what has been done, in lines that read like Python.
    """

    lengths: ClassVar[tuple[int, int]] = (4, 24)
    weights: ClassVar[dict[str, int]] = {}

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.step = Step(-1, "setup", seed)
        self.lines: list[str] = []

    @classmethod
    def actions(cls) -> list[str]:
        return sorted(name.removeprefix("do_") for name in dir(cls) if name.startswith("do_"))

    def run(self, step: Step) -> None:
        """Run one step, and check everything."""
        self.step, self.draw = step, random.Random(step.seed)
        torch.manual_seed(step.seed)
        getattr(self, f"do_{step.action}")()
        self.check()

    def check(self) -> None:
        """Compare everything with the model."""

    def close(self) -> None:
        """Called at the end, also after a failure."""

    def note(self, line: str) -> None:
        self.lines.append(line)

    def pick(self, names: Iterable[str]) -> str:
        """One of the names. If others are missing because a step was left out, it is the same one."""
        salt = self.draw.random()
        return min(names, key=lambda name: zlib.crc32(f"{salt}{name}".encode()))

    def attempt(self, call: Callable[[], Something], refusal: str | None, *, perhaps: bool = False) -> Something | None:
        """Run what the library must refuse for the reason ``refusal``, or must do if there is none.

        Args:
            call: what to run.
            refusal: why it must be refused.
            perhaps: it may be refused or done.

        Returns:
            The result; None if it was refused, which is added to the last line.
        """
        try:
            result = call()
        except REFUSALS as error:
            if not str(error) or (refusal is None and not perhaps):
                raise AssertionError(f"refused without a reason: {type(error).__name__}: {error}") from error
            self.lines[-1] += f"  # refused: {refusal}"
            return None
        assert refusal is None or perhaps, f"not refused, although {refusal}"
        return result


AnyWorld = TypeVar("AnyWorld", bound=World)


def program(world: type[World], seed: int) -> list[Step]:
    """The steps of program ``seed``."""
    draw = random.Random(f"{world.__name__} {seed}")
    names = world.actions()
    weights = [world.weights.get(name, 1) for name in names]
    length = draw.randint(*world.lengths)
    actions = draw.choices(names, weights, k=length)
    return [Step(number, action, draw.getrandbits(32)) for number, action in enumerate(actions)]


class Failure(NamedTuple):
    """How a program failed: what was raised, and the lines up to there."""

    error: BaseException
    lines: list[str]

    @property
    def kind(self) -> str:
        """The same for failures with the same cause, mostly: the type, and the text without numbers and names."""
        return type(self.error).__name__ + re.sub(r"[\d.\[\]-]+|'.*?'|t\d+", "", str(self.error))[:60]


def failure_of(world: type[World], seed: int, steps: Sequence[Step]) -> Failure | None:
    """Run a program; None if nothing is wrong."""
    running: World | None = None
    try:
        running = world(seed)
        for step in steps:
            running.run(step)
    except Exception as error:
        return Failure(error, running.lines if running is not None else [])
    finally:
        if running is not None:
            running.close()
    return None


def shortened(world: type[World], seed: int, steps: list[Step], failure: Failure) -> tuple[list[Step], Failure]:
    """Leave out steps, many at a time and then fewer, as long as the program fails in the same way."""
    size = max(1, len(steps) // 2)
    while size:
        start = 0
        while start < len(steps):
            fewer = steps[:start] + steps[start + size :]
            found = failure_of(world, seed, fewer)
            if found is not None and found.kind == failure.kind:
                steps, failure = fewer, found
            else:
                start += size
        size //= 2
    return steps, failure


def run_programs(world: type[World], seeds: Iterable[int], chosen: Sequence[int] | None = None) -> None:
    """Run the programs of these seeds; of a failing one show the shortest form.

    Args:
        world: what programs work on.
        seeds: the numbers of the programs.
        chosen: run only the steps with these numbers.
    """
    for seed in seeds:
        steps = program(world, seed)
        if chosen is not None:
            steps = [step for step in steps if step.number in chosen]
        failure = failure_of(world, seed, steps)
        if failure is not None:
            steps, failure = shortened(world, seed, steps, failure)
            pytest.fail(report(world, seed, steps, failure), pytrace=False)


def report(world: type[World], seed: int, steps: Sequence[Step], failure: Failure) -> str:
    """The short program, what went wrong, and how to run it again."""
    numbers = ",".join(str(step.number) for step in steps)
    trace: Any = traceback.format_exception(failure.error)
    return (
        f"program {seed} of {world.__name__} fails:\n\n  "
        + "\n  ".join(failure.lines)
        + f"\n\n{''.join(trace)}\nRun it again: make fuzz SEED={seed} PROGRAMS=1, or only these steps: "
        + f"pytest tests/attack -k {world.__name__} --seed {seed} --programs 1 --steps {numbers}"
    )
