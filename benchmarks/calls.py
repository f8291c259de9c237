"""How many Python calls one step of a linear layer makes, through which files, in which order.

    python -m benchmarks.calls                       # counts for the usual recipes
    python -m benchmarks.calls --walk --recipe mxfp8 # every call of the step, indented by depth

Calls are counted in steady state, with one thread, of everything that is Python: crossgrain, torch and the standard
library. What is counted does not depend on the machine, so a test keeps the numbers from growing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import crossgrain as cg

from .timing import one_thread

RECIPES = {
    "MXFP8": "mxfp8",
    "MXFP8 forward, NVFP4 backward": "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)",
    "the same, weights from rows": "mxfp8-fwd-nvfp4-bwd",
    "NVFP4": "nvfp4",
}
SHAPE = (128, 256, 256)  # tokens, in, out

DECORATORS = ("runtime/derivatives.py",)  # what they wrap is called from there, and is no callback

_PACKAGE = Path(cg.__file__).parent


class Call(NamedTuple):
    """One call. ``file`` is relative to the package, or None outside of it; ``caller`` that of the calling code."""

    depth: int
    function: str
    file: str | None
    caller: str | None

    @property
    def room(self) -> str | None:
        return None if self.file is None else Path(self.file).parts[0]


class Walk(NamedTuple):
    """All calls of a pass, in order."""

    calls: list[Call]

    @property
    def files(self) -> list[str]:
        """Those of crossgrain, in the order in which they are first entered."""
        return list(dict.fromkeys(call.file for call in self.calls if call.file is not None))

    def upward(self, rooms: Sequence[str]) -> list[Call]:
        """Calls from a room into one that comes after it in ``rooms``: callbacks."""
        found = []
        for call in self.calls:
            caller = None if call.caller in (None, *DECORATORS) else Path(str(call.caller)).parts[0]
            if call.room in rooms and caller in rooms and rooms.index(call.room) > rooms.index(caller):
                found.append(call)
        return found


class Step(NamedTuple):
    forward: Walk
    backward: Walk


def step_of(recipe: str) -> Step:
    """The calls of one step of a `Linear` that has made some steps before."""
    tokens, inputs, outputs = SHAPE
    layer, x = cg.Linear(inputs, outputs), torch.randn(tokens, inputs, requires_grad=True)
    dy = torch.randn(tokens, outputs)
    context = cg.recipe.as_recipe(recipe)
    for _ in range(3):
        with cg.autocast(recipe=context):
            y = layer(x)
        y.backward(dy)
    with cg.autocast(recipe=context):
        forward = _walk(lambda: layer(x))
    return Step(forward.walk, _walk(lambda: forward.result.backward(dy)).walk)


class _Walked(NamedTuple):
    result: Any
    walk: Walk


def _walk(run: Callable[[], Any]) -> _Walked:
    calls: list[Call] = []
    depth = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        if event == "call":
            back = frame.f_back
            calls.append(Call(depth, frame.f_code.co_qualname, _file(frame), None if back is None else _file(back)))
            depth += 1
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return _Walked(result, Walk(calls[1:]))  # without the call of ``run`` itself


def _file(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", help="a preset or a line, instead of the usual ones")
    parser.add_argument("--walk", action="store_true", help="print every call")
    options = parser.parse_args(arguments)
    recipes = RECIPES if options.recipe is None else {options.recipe: options.recipe}
    print(f"{'Python calls of one Linear ' + str(list(SHAPE)):<44} {'forward':>8} {'backward':>9} {'files':>9}")
    for name, recipe in recipes.items():
        with one_thread():
            step = step_of(recipe)
        files = f"{len(step.forward.files)}, {len(step.backward.files)}"
        print(f"{name:<44} {len(step.forward.calls):>8} {len(step.backward.calls):>9} {files:>9}")
        if options.walk:
            for title, walk in step._asdict().items():
                print(f"\n{title}")
                for call in walk.calls:
                    print(f"{'  ' * call.depth}{call.function}  {call.file or ''}")


if __name__ == "__main__":
    main()
