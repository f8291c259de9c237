"""``crossgrain search``: find a recipe for a model, verify it by training, and write a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ..lab.gpt_checkpoint import GPTCheckpoint
from ..lab.start import Start
from ..lab.study import Study, study
from .lab_start import DEFAULT_CANDIDATES, Base, Candidates, From, gpt_checkpoint, split_candidates, start_of_user
from .mistakes import mistakes_are_shown
from .output import AsJson, fail, print_json, print_text, progress_bar
from .sizes import Size, SizeName, preset_of

Minutes = Annotated[float, typer.Option(min=0.1, help="About how long it may take.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of each training run of the small GPT that verifies.")]
Saving = Annotated[
    float | None, typer.Option(min=0, max=1, help="Share of the GEMM time to save that the candidate could save: 0.8.")
]
MaxGap = Annotated[float | None, typer.Option(help="Largest predicted gap, in nats per token, instead of --saving.")]
Device = Annotated[str, typer.Option(help="The GPU whose published rates are used.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a batch in the run that is planned.")]
Scale = Annotated[float | None, typer.Option(help="As if the model were so many times wider.")]
Rules = Annotated[list[str], typer.Option("--rule", help="A rule that the recipe keeps: 'head: hp'. May be repeated.")]
Out = Annotated[Path, typer.Option(help="Directory for the report and the numbers. An interrupted search goes on.")]

_TRAINING = 0.2  # share of the time in which the small GPT is trained
_FEWEST_STEPS, _MOST_STEPS = 100, 2000
_WIDTH_OF_LARGE_MODELS = 4096  # as wide as the small GPT is taken to be: GEMMs of its own size only move memory
_TOKENS_OF_LARGE_RUNS = 16384


def search(
    candidates: Candidates = DEFAULT_CANDIDATES,
    base: Base = "mxfp8",
    saving: Saving = None,
    max_gap: MaxGap = None,
    rules: Rules = [],  # noqa: B006  # typer copies it
    origin: From = None,
    size: Size = SizeName.tiny,  # type: ignore[attr-defined]
    minutes: Minutes = 5,
    steps: Steps = 60,
    device: Device = "b200",
    tokens: Tokens = None,
    scale: Scale = None,
    out: Out = Path("out"),
    as_json: AsJson = False,
) -> None:
    if saving is not None and max_gap is not None:
        raise fail("give --saving or --max-gap, not both", code=2)
    target: dict[str, Any] = {"saving": 0.8 if saving is None else saving}
    if max_gap is not None:
        target = {"max_gap": max_gap}
    out.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, mistakes_are_shown():
        if origin is None:
            start, spent = _small_gpt(size, minutes, steps, out, progress)
            scale = _WIDTH_OF_LARGE_MODELS / preset_of(size).model.width if scale is None else scale
            tokens = _TOKENS_OF_LARGE_RUNS if tokens is None else tokens
        else:
            start, spent = start_of_user(origin), 0.0
        task = progress.add_task("", total=1.0)
        try:
            result = study(
                start,
                base=base,
                candidates=split_candidates(candidates),
                target=target,
                rules=rules,
                device=device,
                tokens=tokens,
                scale=1 if scale is None else scale,
                minutes=max(0.1, minutes - spent / 60),
                out=out,
                on_progress=lambda part, text: progress.update(task, completed=part, description=text),
            )
        except KeyboardInterrupt as error:
            raise fail(
                f"stopped; what is finished is in {out}, and the same command goes on from there", 130
            ) from error
    if as_json:
        print_json({"found": result.found.to_dict(), "files": {name: str(path) for name, path in result.files.items()}})
    else:
        _show(result)


def _small_gpt(size: SizeName, minutes: float, branch: int, out: Path, progress: Progress) -> tuple[Start, float]:
    """The small GPT, trained in fp32 for a share of the time, or as an earlier call has left it."""
    begin, preset = time.monotonic(), preset_of(size)
    checkpoint, path = gpt_checkpoint(preset), out / f"gpt-{size.value}.pt"
    if path.exists():
        checkpoint.load(path)
    else:
        task = progress.add_task("training in fp32", total=1.0)
        seconds = _seconds_per_step(checkpoint)
        steps = max(_FEWEST_STEPS, min(_MOST_STEPS, int(_TRAINING * 60 * minutes / seconds)))
        checkpoint.train(steps, lambda step, loss: progress.update(task, completed=step / steps))
        checkpoint.save(path)
    return checkpoint.start(steps=branch), time.monotonic() - begin


def _seconds_per_step(checkpoint: GPTCheckpoint) -> float:
    begin, steps = time.monotonic(), list(checkpoint.branch(5)(None, 0))
    return (time.monotonic() - begin) / len(steps)


def _show(result: Study) -> None:
    console = Console(highlight=False)
    print_text(str(result.found))
    if result.verification is not None:
        console.print()
        print_text(str(result.verification))
    for note in result.notes:
        console.print(note, style="yellow", markup=False)
    for name, path in result.files.items():
        console.print(f"{name}: {path}", markup=False, soft_wrap=True)
