"""``crossgrain export``: write a model for an inference engine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..convert import convert
from ..export import export as export_model
from ..export.layouts import LAYOUTS
from ..files import load_checkpoint, load_safetensors
from ..files.manifest import is_described
from ..files.safetensors_file import read_safetensors
from ..files.steps import chosen_checkpoint
from ..files.training import manifest_of
from ..recipe.portable import recipe_from_text
from .mistakes import mistakes_are_shown
from .output import AsJson, at_work, fail, print_json, print_text
from .recipes import load_recipe

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def export(
    out: Annotated[Path, typer.Argument(help="The directory to make.")],
    hf: Annotated[Path, typer.Option("--hf", help="Directory of a Hugging Face model: its configuration and weights.")],
    format: Annotated[str, typer.Option("--format", "-f", help=f"One of {', '.join(LAYOUTS)}.")] = "compressed-tensors",
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="The recipe that the model was trained with; by default the checkpoint's."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A training checkpoint, or a safetensors file, of crossgrain; its weights are exported."),
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Layers to leave in high precision; repeatable.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="A safetensors file with the arguments of one call, such as input_ids, to observe inputs."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Dtype of all other tensors: {', '.join(_DTYPES)}.")] = None,
    max_shard_bytes: Annotated[int, typer.Option(min=1, help="Size of a safetensors file.")] = 5 * 10**9,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the directory of an earlier export.")] = False,
    as_json: AsJson = False,
) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise fail(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype}", code=2)
    with mistakes_are_shown():
        chosen = load_recipe(recipe) if recipe is not None else _stored_recipe(checkpoint)
        if chosen is None and format != "plain":
            raise ValueError("--recipe is needed: it says which layers are quantized, and how")
        with at_work(f"reading {hf}"):
            model = _hugging_face_model(hf)
        if chosen is not None:
            convert(model, chosen, skip=skip or ())
        if checkpoint is not None:
            with at_work(f"reading {checkpoint}"):
                _load(model, checkpoint)
        batches = None if inputs is None else [read_safetensors(inputs).state_dict]
        with at_work(f"writing {out}"):
            report = export_model(
                model,
                out,
                format=format,
                dtype=None if dtype is None else _DTYPES[dtype],
                inputs=batches,
                assets=hf,
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
            )
    if as_json:
        print_json({**asdict(report), "directory": str(report.directory)})
    else:
        print_text(str(report))


def _hugging_face_model(directory: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise fail("--hf needs the package transformers: pip install 'crossgrain[hf]'") from None
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} is not the directory of a Hugging Face model: it has no config.json")
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    name = (config.architectures or [""])[0]
    cls = getattr(transformers, name, transformers.AutoModelForCausalLM)
    return cls.from_pretrained(directory, config=config, local_files_only=True)


def _is_training_checkpoint(path: Path) -> bool:
    return path.is_dir() and (is_described(path) or any(is_described(step) for step in path.iterdir() if step.is_dir()))


def _stored_recipe(checkpoint: Path | None) -> Any:
    if checkpoint is None:
        return None
    if _is_training_checkpoint(checkpoint):
        text = manifest_of(chosen_checkpoint(checkpoint))["recipe"]
        return None if text is None else recipe_from_text(text)
    return read_safetensors(checkpoint, verify=False).recipe()


def _load(model: Any, checkpoint: Path) -> None:
    if _is_training_checkpoint(checkpoint):
        load_checkpoint(checkpoint, model=model, random_state=False)
    else:
        load_safetensors(checkpoint, model)
