"""``crossgrain warmup``: compile CPU kernels now, instead of at their first use."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from ..kernels import get_backend
from ..recipe import GemmRecipe, RecipeSchedule
from ..runtime.logs import withheld
from ..runtime.settings import settings
from .output import AsJson, fail, print_json, progress_bar
from .recipes import load_schedule


def warmup(
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            "-r",
            metavar="RECIPE",
            help="Compile only what linear layers need with this recipe (repeatable).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    wanted = [load_schedule(text) for text in recipe or ()]
    with withheld() as warned:
        usable = get_backend("cpu") == "cpu"
    if not usable:
        raise fail("\n".join(warned) or "nothing to compile: the compiled kernels are switched off")

    from ..kernels.cpu.runtime import compiled_so_far  # these import numba
    from ..kernels.warmup import warm_up
    from ..nn.warm_recipe import warm_up_for

    start = time.perf_counter()
    with progress_bar() as progress, settings.override(announce_compiling=False):
        for steps in [warm_up_for(each) for each in wanted] or [warm_up()]:
            task = progress.add_task("")
            for step in steps:
                progress.update(task, description=step.name, completed=step.number, total=step.total)
            progress.update(task, description="done", completed=step.total)
    compiled, seconds = compiled_so_far(), time.perf_counter() - start
    if any(_base(each).fp8_dpa for each in wanted):
        Console(stderr=True).print(
            "The kernels of quantized attention are compiled at their first use.", highlight=False
        )

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


def _base(recipe: GemmRecipe | RecipeSchedule) -> GemmRecipe:
    return recipe.base if isinstance(recipe, RecipeSchedule) else recipe
