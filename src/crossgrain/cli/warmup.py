"""``crossgrain warmup``: compile all CPU kernels now, instead of at their first use."""

from __future__ import annotations

import time
import warnings

from rich.console import Console

from ..kernels import get_backend
from .output import AsJson, fail, print_json, progress_bar


def warmup(as_json: AsJson = False) -> None:
    """Compile all CPU kernels and store them in the cache on disk.

    This takes a minute or two the first time, and seconds when the cache has them already.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = get_backend("cpu") == "cpu"
    if not usable:
        raise fail(
            "\n".join(str(warning.message) for warning in caught)
            or "nothing to compile: the compiled kernels are switched off"
        )

    from ..kernels.cpu.runtime import compiled_so_far  # these import numba
    from ..kernels.warmup import warm_up

    start = time.perf_counter()
    with progress_bar() as progress:
        task = progress.add_task("")
        for step in warm_up():
            progress.update(task, description=step.name, completed=step.number, total=step.total)
        progress.update(task, description="done", completed=step.total)
    compiled, seconds = compiled_so_far(), time.perf_counter() - start

    if as_json:
        print_json(
            {
                "kernels": compiled.kernels,
                "from_cache": compiled.from_disk,
                "seconds": round(seconds, 3),
                "cache": compiled.directory,
            }
        )
    elif compiled.directory is not None:
        console = Console(highlight=False)
        console.print(f"{compiled.kernels} kernels in {seconds:.1f} s, {compiled.from_disk} of them from the cache")
        console.print(f"cache: {compiled.directory}", soft_wrap=True, markup=False)
    if compiled.directory is None:
        raise fail(
            "the kernels were compiled, but no directory to store them is writable: set NUMBA_CACHE_DIR to one that is"
        )
