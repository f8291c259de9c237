"""``crossgrain doctor``: what this machine can do, and whether the bytes are right on it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import typer

from .checkup import Checkup, check_up
from .checkup.findings import Package, SelfTest
from .output import AsJson, at_work, print_json

_WIDTH = 80
_INDENT = 12


def doctor(as_json: AsJson = False) -> None:
    with at_work("comparing kernels with golden vectors"):
        found = check_up()
    if as_json:
        print_json(found.as_data())
    else:
        typer.echo("\n".join(lines(found)))
    if found.problems:
        raise typer.Exit(1)


def lines(found: Checkup) -> Iterator[str]:
    """A checkup as text of at most 80 columns."""
    yield from _entry("versions", ", ".join(map(_package, found.packages)))
    yield from _entry("system", found.system)
    yield from _cpu(found)
    yield from _gpus(found)
    yield from _kernels(found)
    yield from _entry("works with", ", ".join(map(_package, found.clients)) or "no other program was found")
    if not found.variables:
        yield from _entry("variables", "none that matters is set")
    for number, variable in enumerate(found.variables):
        title = "" if number else "variables"
        yield from _entry(title, f"{variable.name}={variable.value}: {variable.effect}")
    for number, test in enumerate(found.self_tests):
        yield from _entry("" if number else "self-test", _self_test(test))
    yield ""
    if found.problems:
        for problem in found.problems:
            yield from _entry("BROKEN", problem)
    else:
        yield "All is well."


def _entry(title: str, text: str) -> list[str]:
    """A title and its text, which goes on in lines that are indented."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=title.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    ) or [title]


def _package(package: Package) -> str:
    return f"{package.name} {package.version or '(not installed)'}"


def _cpu(found: Checkup) -> Iterator[str]:
    cpu = found.processor
    yield from _entry("CPU", f"{cpu.model}, {cpu.cores} processors, {cpu.torch_threads} threads of torch")
    without = f"; without {', '.join(cpu.missing)}" if cpu.missing else ""
    yield from _entry("", (", ".join(cpu.features) or "no instructions that matter") + without)


def _gpus(found: Checkup) -> Iterator[str]:
    if not found.gpus:
        yield from _entry("GPU", f"none: {found.no_gpu}")
        return
    for gpu in found.gpus:
        yield from _entry("GPU", f"{gpu.device}: {gpu.name}, {gpu.generation}, {gpu.memory_bytes / 2**30:.0f} GiB")
        for name, way in gpu.gemms.items():
            yield from _entry("", f"{name}: {way}")
    yield from _entry(
        "",
        "The kernels are proved in emulation. How they do on hardware is wanted: in a clone, run make test-gpu, and "
        "send what it says (docs/how-to/on-your-gpu.md).",
    )


def _kernels(found: Checkup) -> Iterator[str]:
    for number, backend in enumerate(found.backends):
        note = "" if backend.note is None else f" ({backend.note})"
        yield from _entry("" if number else "kernels", f"{backend.device}: {backend.name or 'none'}{note}")
    cache = found.cache
    if cache.directory is None:
        yield from _entry("cache", "none: kernels are compiled in every process, or there are none")
        return
    how = "writable" if cache.writable else "not writable: set NUMBA_CACHE_DIR to a directory that is"
    yield from _entry("cache", f"{cache.directory}: {cache.files} files, {cache.size_bytes / 2**20:.1f} MiB, {how}")


def _self_test(test: SelfTest) -> str:
    if test.problems:
        result = "FAILED"
    elif test.cases < test.of:
        result = f"right in {test.cases} of {test.of} cases; crossgrain warmup compiles what the others need"
    else:
        result = f"right in all {test.of} cases"
    return f"{test.backend} on {test.device}: {result} ({test.seconds:.1f} s)"
