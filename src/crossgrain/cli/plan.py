"""``crossgrain plan``: estimate the memory, communication and time of a large training run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..planning import Plan
from ..planning import plan as make_layer_formats
from ..planning.devices import DEVICES
from ..planning.report import COMPARISON_NOTE, as_table, bullets, comparison, missing_rates, sections, title, verdict
from .mistakes import mistakes_are_shown
from .output import AsJson, print_json
from .recipes import labelled, split_recipes

Model = Annotated[
    str, typer.Option(help="Name of a model, such as llama3-70b, or with changed dimensions: 'llama3-8b, layers=16'.")
]
Recipes = Annotated[
    list[str], typer.Option("--recipe", "-r", help="A preset, a one-line recipe, or a file. Several are compared.")
]
DeviceText = Annotated[
    str, typer.Option(help=f"One of {', '.join(DEVICES)}; or with changed numbers: 'b200, memory=192'.")
]
DTypeText = Annotated[
    str, typer.Option(help="Dtype of activations and of high-precision parameters: fp32, bf16 or fp16.")
]


def plan(
    model: Model,
    recipe: Recipes,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    device: DeviceText = "b200",
    sequence: Annotated[int | None, typer.Option(help="Tokens per sequence; default: the model's.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences per micro batch and replica.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro batches per step.")] = 1,
    sharding: Annotated[str, typer.Option(help="How GPUs hold parameters: fsdp or replicated.")] = "fsdp",
    reshard: Annotated[
        bool, typer.Option(help="Free gathered weights after forward and gather them again for backward.")
    ] = True,
    tensor_parallel: Annotated[int, typer.Option("--tp", help="GPUs per tensor-parallel group.")] = 1,
    parameters: Annotated[
        str, typer.Option(help="How parameters are kept: quantized or high_precision.")
    ] = "quantized",
    gather: Annotated[
        str | None, typer.Option(help="How weights travel: planes or high_precision; default: as they are kept.")
    ] = None,
    dtype: DTypeText = "bf16",
    gradient_dtype: Annotated[str | None, typer.Option(help="Dtype of gradients; default: that of --dtype.")] = None,
    reduce_dtype: Annotated[
        str | None, typer.Option(help="Dtype in which gradients are reduced; default: that of gradients.")
    ] = None,
    master: Annotated[str, typer.Option(help="Master weights: fp32, fp16, remainder or none.")] = "fp32",
    moments: Annotated[
        str,
        typer.Option(help="Dtype of the optimizer's moments: fp32, bf16, fp16 or fp8; or two, separated by a comma."),
    ] = "fp32",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute the forward pass of each block in backward.")
    ] = False,
    gemm_efficiency: Annotated[
        float, typer.Option("--gemm-rate", help="Fraction of the peak rate that GEMMs reach.")
    ] = 1.0,
    wire_efficiency: Annotated[
        float, typer.Option("--wire-rate", help="Fraction of the peak rate that the network reaches.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    first, _, second = (part.strip() for part in moments.partition(","))
    recipes = labelled(split_recipes(recipe))
    with mistakes_are_shown():
        plans = {
            label: make_layer_formats(
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
