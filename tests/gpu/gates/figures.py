"""What the compilers made of a launch, for one target."""

from dataclasses import dataclass
from functools import lru_cache

from ..kernels.emulated import compiled, passed_arguments
from ..offline import Built
from ..ptx import run
from .launches import Launch, Work


@lru_cache(maxsize=256)
def built(work: Work, target: str) -> tuple[Built, Launch]:
    """The machine code of some work for a target, and its launch."""
    launch = work.launch(target)
    return compiled(launch.kernel, target, launch.warps, launch.arguments), launch


def instructions_per_element(work: Work, target: str) -> float:
    """Machine instructions for each number, of all threads together."""
    code, launch = built(work, target)
    return code.instructions_per_element(launch.elements)


@dataclass(frozen=True)
class Conflicts:
    """Turns that accesses to shared memory take, and those that they would take without conflicts between banks."""

    turns: int
    needed: int


def shared_memory(work: Work, target: str) -> Conflicts:
    """The conflicts of a run in the emulator."""
    code, launch = built(work, target)
    report = run(code.ptx, (launch.programs,), passed_arguments(launch.kernel, launch.arguments, code), code.shared)
    found = report.conflicts.values()
    return Conflicts(sum(each.turns for each in found), sum(each.needed for each in found))
