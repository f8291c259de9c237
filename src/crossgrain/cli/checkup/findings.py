"""The data of a checkup."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Package:
    """A Python package.

    Attributes:
        name: its name on PyPI.
        version: its version; None if it is not installed.
        problem: why it cannot be used although it is installed; None if nothing is known against it.
    """

    name: str
    version: str | None
    problem: str | None = None


@dataclass(frozen=True)
class Processor:
    """The CPU.

    Attributes:
        model: what it calls itself.
        cores: number of logical processors.
        torch_threads: threads that torch uses.
        features: instructions that it announces and that matter here.
        missing: those that it does not announce.
        problem: an instruction that it announces and does not run, and what to do about it; None if there is none.
    """

    model: str
    cores: int
    torch_threads: int
    features: tuple[str, ...]
    missing: tuple[str, ...]
    problem: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        device: what torch calls it, such as "cuda:0".
        name: its name.
        generation: its compute capability, or the name of an AMD architecture.
        memory_bytes: size of its memory.
        gemms: for each format, how a layer in this format is multiplied: "native", or "decoded" and why.
    """

    device: str
    name: str
    generation: str
    memory_bytes: int
    gemms: dict[str, str]


@dataclass(frozen=True)
class Backend:
    """The kernels for a type of device.

    Attributes:
        device: the type of device.
        name: the kernels that serve it; None if there is no such device here.
        note: why it is not the fast ones, or why there is none; None if there is nothing to say.
        broken: kernels could not be loaded, and not because something is missing.
    """

    device: str
    name: str | None
    note: str | None = None
    broken: bool = False


@dataclass(frozen=True)
class KernelCache:
    """Compiled kernels on disk.

    Attributes:
        directory: where they are; None if there is no directory that can be written to, or no compiler.
        files: number of files.
        size_bytes: their size.
        writable: whether more can be stored there.
    """

    directory: str | None
    files: int = 0
    size_bytes: int = 0
    writable: bool = False


@dataclass(frozen=True)
class Variable:
    """An environment variable that is set.

    Attributes:
        name: its name.
        value: its value.
        effect: what it does here.
    """

    name: str
    value: str
    effect: str


@dataclass(frozen=True)
class SelfTest:
    """Golden vectors on one backend.

    Attributes:
        backend: name of the backend.
        device: the device.
        cases: number of the cases that were run.
        of: number of all cases. The rest did not fit into the time, because kernels had to be compiled.
        seconds: how long it took.
        problems: what is wrong.
    """

    backend: str
    device: str
    cases: int
    of: int
    seconds: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkup:
    """Everything that was found."""

    packages: tuple[Package, ...]
    clients: tuple[Package, ...]
    system: str
    processor: Processor
    gpus: tuple[Gpu, ...]
    no_gpu: str | None
    backends: tuple[Backend, ...]
    cache: KernelCache
    variables: tuple[Variable, ...]
    self_tests: tuple[SelfTest, ...]

    @property
    def problems(self) -> list[str]:
        """What is broken, in words. What is merely missing is not."""
        broken = [f"{each.name}: {each.problem}" for each in self.packages if each.problem is not None]
        broken += [self.processor.problem] if self.processor.problem is not None else []
        broken += [f"{each.device} kernels: {each.note}" for each in self.backends if each.broken]
        for test in self.self_tests:
            broken += [f"{test.backend} kernels on {test.device}: {problem}" for problem in test.problems]
        return broken

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "problems": self.problems}
