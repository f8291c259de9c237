"""``crossgrain sensitivity``: which GEMM of which layer can be in which format."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..lab.sensitivity import sensitivity as measure
from ..lab.sensitivity.groups import GROUPINGS
from ..lab.sensitivity.text import table
from .lab_start import DEFAULT_CANDIDATES, Base, Candidates, From, gpt_checkpoint, split_candidates, start_of_user
from .mistakes import mistakes_are_shown
from .output import AsJson, print_json, print_text, progress_bar
from .sizes import Size, SizeName, Steps, preset_of

GroupName = Enum("GroupName", {name: name for name in GROUPINGS})  # type: ignore[misc]  # an option has to be an Enum
Groups = Annotated[GroupName, typer.Option(help="Which layers are measured together in dgrad.")]
Count = Annotated[int, typer.Option("--batches", min=2, help="Number of batches.")]
Out = Annotated[Path, typer.Option(help="JSON file to write. What it has already is not measured again.")]


def sensitivity(
    candidates: Candidates = DEFAULT_CANDIDATES,
    base: Base = "mxfp8",
    origin: From = None,
    size: Size = SizeName.tiny,  # type: ignore[attr-defined]
    steps: Steps = None,
    groups: Groups = GroupName.layer,  # type: ignore[attr-defined]
    count: Count = 8,
    out: Out = Path("out/sensitivity.json"),
    as_json: AsJson = False,
) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, mistakes_are_shown():
        if origin is None:
            preset = preset_of(size, steps)
            checkpoint = gpt_checkpoint(preset)
            task = progress.add_task("training in fp32", total=preset.steps)
            checkpoint.train(preset.steps, lambda step, loss: progress.update(task, completed=step))
            start = checkpoint.start(count)
        else:
            start = start_of_user(origin)
        bar = progress.add_task("", total=1.0)
        result = measure(
            start.model,
            start.batches,
            start.loss_fn,
            base=base,
            candidates=split_candidates(candidates),
            optimizer=start.optimizer,
            groups=groups.value,
            count=count,
            tokens=start.tokens,
            skip=start.skip,
            include=start.include,
            path=out,
            on_progress=lambda part, text: progress.update(bar, completed=part, description=text),
        )
    if as_json:
        print_json(result.to_dict())
    else:
        print_text(table(result, Console().width))
        print_text(f"numbers: {out}")
    if result.interrupted:
        raise typer.Exit(130)
