"""`export`: write a model for an inference engine, with the bytes that fprop multiplies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..files.bound import recipe_text
from ..files.safetensors_file import plain_tensors, safetensors_package
from ..recipe import Recipe
from .checks import check_finite
from .contents import ConfigChoice, Contents, Rename, bound_recipe, config_of, contents_of, renaming
from .directory import check_can_write, copy_assets, new_export, write_json, write_shards
from .gguf import Gguf, gguf_package
from .gpt_oss import GptOss
from .inputs import Batches, observed_amaxes, remembered_amaxes
from .layout import AMAX, Layout, is_nvfp4
from .layouts import layout_named
from .notes import notes_on_fused_layers
from .plain import Plain
from .walk import Bytes


@dataclass(frozen=True)
class ExportReport:
    """What `export` wrote. ``print`` it to read it.

    Attributes:
        directory: the directory.
        format: the layout.
        quantized: names of the quantized weights, with their formats.
        plain: names of the tensors that are stored as they are.
        files: names of all files.
        notes: what you should know before you serve the model.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     report = cg.export(model, f"{directory}/out", format="plain")
        ...     (report.directory / "model.safetensors").exists()
        True
    """

    directory: Path
    format: str
    quantized: dict[str, str] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        by_format: dict[str, int] = {}
        for name in self.quantized.values():
            by_format[name] = by_format.get(name, 0) + 1
        weights = ", ".join(f"{count} in {name}" for name, count in by_format.items()) or "none"
        return "\n".join(
            [
                f"exported to {self.directory} as {self.format}: {', '.join(self.files)}",
                f"quantized weights: {weights}",
                f"tensors in high precision: {len(self.plain)}",
                *(f"note: {note}" for note in self.notes),
            ]
        )


def export(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    format: str,
    recipe: Recipe | str | None = None,
    dtype: torch.dtype | None = None,
    inputs: Batches | None = None,
    config: ConfigChoice = None,
    rename: Rename = None,
    assets: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> ExportReport:
    """Write a model in the layout of an inference engine.

    The stored codes and scales are those of the rowwise planes that fprop multiplies, byte for byte: the planes of
    weights that are kept quantized, otherwise the weights quantized once by the quantizers of their layers. Everything
    else is stored as it is. The directory is complete, or not there.

    Args:
        model: a model that `convert` has changed, or one of crossgrain's modules. It is not changed.
        directory: the directory to make.
        format: "compressed-tensors" (vLLM, transformers), "modelopt" (TensorRT-LLM, vLLM, SGLang), "gpt-oss" (experts
            in MXFP4), "gguf" (llama.cpp), or "plain" (every program; nothing is quantized).
        recipe: the recipe of layers that are bound to none because they run in an autocast.
        dtype: dtype of the tensors that are not quantized; None keeps the dtype of each.
        inputs: batches to observe the inputs of layers with, for layouts that store a scale for them. The model is
            then stored as one with quantized activations.
        config: the configuration for ``config.json``, or a file with it; by default that of a Hugging Face model.
        rename: other names for tensors: a function, or a table of those that change.
        assets: a directory from which all files but weights and configuration are copied: tokenizer, templates.
        max_shard_bytes: size of a safetensors file.
        overwrite: replace the directory of an earlier export.

    Returns:
        What was written.

    Raises:
        ValueError: the layout cannot hold the model; the message names the layers and what can be done. Nothing has
            been written.
        FileExistsError: the directory exists.
        ImportError: a package that writes the files is not installed.
        OSError: the disk is full or not writable; nothing is left behind.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     report = cg.export(model, f"{directory}/out", format="compressed-tensors")
        ...     sorted(path.name for path in report.directory.iterdir())
        ['config.json', 'manifest.json', 'manifest.sha256', 'model.safetensors']
    """
    layout, path = layout_named(format), Path(directory)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    check_can_write(path, overwrite)
    gguf_package() if isinstance(layout, Gguf) else safetensors_package()
    bound = bound_recipe(recipe, model)
    about = {"format": layout.name, "recipe": _recipe_text(model, bound)}
    if isinstance(layout, Plain):
        contents = _plain_contents(model, dtype, config, rename)
    else:
        contents = contents_of(model, bound, dtype, config, rename, names_of_files=layout.names_of_files)
        contents.input_amaxes = _input_amaxes(model, contents, inputs, bound, layout)
    layout.check(contents)
    report = ExportReport(
        path,
        layout.name,
        {name: weight.format.name for name, weight in contents.weights.items() if weight.format},
        list(contents.plain),
        notes=contents.notes,
    )
    with new_export(path, overwrite, about) as temporary:
        amaxes = _write(layout, temporary, contents, max_shard_bytes)
        contents.notes.extend(notes_on_fused_layers(amaxes))
        for name, content in layout.files(contents).items():
            if content:
                write_json(temporary / name, content)
        generation: Any = getattr(model, "generation_config", None)
        if contents.config and hasattr(generation, "to_json_string"):
            write_json(temporary / "generation_config.json", json.loads(generation.to_json_string()))
        if assets is not None:
            copy_assets(Path(assets), temporary)
        report.files.extend(sorted(file.name for file in temporary.iterdir()))
    return report


def _recipe_text(model: nn.Module, recipe: Recipe | None) -> str | None:
    """The recipe for the manifest. It is only told, so a recipe without a text does not stop the export."""
    try:
        return recipe_text("bound" if recipe is None else recipe, [model])
    except (TypeError, ValueError):
        return None


def _plain_contents(model: nn.Module, dtype: torch.dtype | None, config: ConfigChoice, rename: Rename) -> Contents:
    chosen = torch.bfloat16 if dtype is None else dtype
    renamed = renaming(rename)
    tensors = {renamed(name): tensor for name, tensor in plain_tensors(model, chosen).items()}
    return Contents({}, tensors, [], config_of(model, config, chosen), chosen)


def _input_amaxes(
    model: nn.Module, contents: Contents, inputs: Batches | None, recipe: Recipe | None, layout: Layout
) -> dict[str, float]:
    if inputs is not None:
        return observed_amaxes(model, contents.weights, inputs)
    if layout.name != "modelopt":
        return {}
    found = remembered_amaxes(contents.weights, recipe)
    return found if len(found) == len(contents.weights) else {}


def _write(layout: Layout, directory: Path, contents: Contents, max_shard_bytes: int) -> dict[str, float]:
    """Write all tensors, and return the numbers that scale whole weights, by name."""
    amaxes: dict[str, str] = {}
    scales: dict[str, float] = {}

    def read() -> Iterator[tuple[str, Bytes]]:
        for name, weight in contents.weights.items():
            found = weight.read()
            check_finite(name, found)
            if is_nvfp4(found.format) and found.amax is not None:
                amaxes[name] = float(found.amax).hex()
                scales[name] = float(found.amax)
            elif found.format.block is None:
                scales[name] = float(found.scales)
            yield name, found

    if isinstance(layout, Gguf):
        layout.write(directory, contents, read(), lambda: json.dumps(amaxes) if amaxes else None)
    else:
        write_shards(directory, _tensors(layout, contents, read()), max_shard_bytes, {AMAX: amaxes})
    return scales


def _tensors(layout: Layout, contents: Contents, read: Iterator[tuple[str, Bytes]]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the safetensors files; each is made when it is written."""
    if isinstance(layout, GptOss):
        sizes: Mapping[str, list[str]] = dict(layout.stacks(contents))
        waiting: dict[str, list[Any]] = {}
        for name, found in read:
            key = contents.weights[name].key
            waiting.setdefault(key, []).append(found)
            if len(waiting[key]) == len(sizes[key]):
                yield from layout.stacked(contents.renamed(key), waiting.pop(key)).items()
    else:
        for name, found in read:
            yield from layout.tensors(name, found, contents).items()
    for name in contents.plain:
        yield name, contents.plain_tensor(name)
