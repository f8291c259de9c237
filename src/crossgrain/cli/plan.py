"""``crossgrain plan``: what a large run would cost, on paper."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..planning import Plan
from ..planning import plan as make_plan
from ..planning.devices import DEVICES
from ..planning.report import COMPARISON_NOTE, as_table, bullets, comparison, missing_rates, sections, title, verdict
from .output import AsJson, print_json
from .recipes import labelled, mistakes_are_shown, split_recipes

Model = Annotated[str, typer.Option(help="Such as llama3-70b; or dimensions, as in 'llama3-8b, layers=16'.")]
Recipes = Annotated[
    list[str], typer.Option("--recipe", "-r", help="A preset, a line or a file; several are compared in a table.")
]
DeviceText = Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}; or changed: 'b200, memory=192'.")]
DTypeText = Annotated[str, typer.Option(help="fp32, bf16 or fp16: activations, and parameters in high precision.")]


def plan(
    model: Model,
    recipe: Recipes,
    gpus: Annotated[int, typer.Option(min=1)] = 1,
    device: DeviceText = "b200",
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence, if not those of the model.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a micro batch of one replica.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="In a step.")] = 1,
    sharding: Annotated[str, typer.Option(help="fsdp or replicated.")] = "fsdp",
    reshard: Annotated[bool, typer.Option(help="Gather weights again for backward.")] = True,
    tensor_parallel: Annotated[int, typer.Option("--tp", help="GPUs that share a replica.")] = 1,
    parameters: Annotated[str, typer.Option(help="Kept quantized or high_precision.")] = "quantized",
    gather: Annotated[str | None, typer.Option(help="planes or high_precision, if not as parameters are kept.")] = None,
    dtype: DTypeText = "bf16",
    gradient_dtype: Annotated[str | None, typer.Option(help="If not that.")] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="If not that of gradients.")] = None,
    master: Annotated[str, typer.Option(help="fp32, fp16, remainder or none.")] = "fp32",
    moments: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8; or two of them, with a comma.")] = "fp32",
    recompute: Annotated[bool, typer.Option("--recompute", help="Blocks run forward again in backward.")] = False,
    gemm_efficiency: Annotated[float, typer.Option("--gemm-rate", help="Part of the peak that GEMMs reach.")] = 1.0,
    wire_efficiency: Annotated[float, typer.Option("--wire-rate", help="The same for the wire.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Memory, bytes on the wire and time of a step, from published peaks and exact sizes, with all assumptions."""
    first, _, second = (part.strip() for part in moments.partition(","))
    recipes = labelled(split_recipes(recipe))
    with mistakes_are_shown():
        plans = {
            label: make_plan(
                model,
                chosen,
                gpus=gpus,
                device=device,
                sequence=sequence,
                batch=batch,
                micro_batches=micro_batches,
                sharding=sharding,
                reshard_after_forward=reshard,
                tensor_parallel=tensor_parallel,
                parameters=parameters,
                gather=gather,
                dtype=dtype,
                gradient_dtype=gradient_dtype,
                reduce_dtype=reduce_dtype,
                master=master,
                moments=(first, second or first),
                recompute=recompute,
                gemm_efficiency=gemm_efficiency,
                wire_efficiency=wire_efficiency,
            )
            for label, chosen in recipes.items()
        }
    if as_json:
        found = [{"label": label, **made.to_dict()} for label, made in plans.items()]
        print_json(found[0] if len(found) == 1 else found)
    else:
        _show(plans)


def _show(plans: dict[str, Plan]) -> None:
    console = Console(highlight=False)
    first = next(iter(plans.values()))
    console.print(title(first), style="bold", markup=False)
    if len(plans) == 1:
        console.print(f"recipe: {first.recipe}\n", markup=False)
        for section in sections(first):
            console.print(as_table(section))
            console.print()
        console.print(verdict(first), style="green" if first.fits else "red", markup=False)
    else:
        console.print()
        console.print(as_table(comparison(plans)))
        console.print(f"\n{COMPARISON_NOTE}", style="dim", markup=False)
        for label, made in plans.items():
            if label.startswith("recipe "):
                console.print(f"{label}: {made.recipe}", markup=False)
    for line in dict.fromkeys(filter(None, map(missing_rates, plans.values()))):
        console.print(line, style="yellow", markup=False)
    console.print("\nassumptions", style="bold")
    sentences = dict.fromkeys(sentence for made in plans.values() for sentence in made.assumptions)
    for line in bullets(sentences, min(console.width, 120)):
        console.print(line, markup=False, soft_wrap=True)
