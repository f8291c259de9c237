"""`load_exported`: load a model in the layout of another program into a model that trains.

The rowwise plane of a weight gets the stored codes and scales, byte for byte. Its columnwise plane, which no such
layout stores, is the same numbers transposed if that is exact (per-tensor scales, square tiles); otherwise the decoded
rowwise plane is quantized by the columnwise quantizer of the weight.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import kernels
from ..files.manifest import DamagedFileError
from ..files.undo import all_or_nothing
from ..nn import QuantizedModule
from ..planes import Plane
from ..recipe import Recipe
from ..runtime.logs import warn
from ..tensor import QuantizedTensor
from .checks import check_finite, kind_of
from .contents import Contents, Rename, bound_recipe, contents_of
from .gpt_oss import GptOss
from .kept import adopt, check_can_keep, rows_tensor
from .layout import Layout, plane_from
from .layouts import LAYOUTS
from .plain import Plain
from .reading import StoredTensors
from .walk import Bytes, ExportedWeight


def load_exported(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    recipe: Recipe | str | None = None,
    rename: Rename = None,
    keep_quantized: bool = True,
    verify: bool = True,
) -> list[str]:
    """Load a directory that `export` wrote, or another program in one of its layouts. If it fails, nothing has changed.

    Weights of layers that follow a recipe become parameters that are kept quantized, with the stored bytes in their
    rowwise planes: the model computes with the numbers of the file, and training continues from them. Parameters that
    were in high precision are replaced by new ones, so make the optimizer afterwards (`optim.FusedAdam` and
    `with_masters` keep masters).

    Args:
        model: a model of the same architecture, converted with a recipe whose fprop has the formats of the file.
        directory: the directory to read.
        recipe: the recipe of layers that are bound to none.
        rename: the names of the tensors in the file, as it was passed to `export`.
        keep_quantized: False decodes the weights into the parameters of the model instead, in their dtypes.
        verify: compare all files with the checksums in the manifest, if there is one.

    Returns:
        The names of the weights that were quantized in the file.

    Raises:
        FileNotFoundError: there is no model in the directory.
        DamagedFileError: a file is missing, truncated, modified or inconsistent.
        ValueError: the file does not fit the model: other formats, shapes or names.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = cg.export(model, f"{directory}/out", format="compressed-tensors")
        ...     cg.load_exported(model, f"{directory}/out")  # the weights that are quantized now
        ['0.weight']
        >>> type(model[0].weight)
        <class 'crossgrain.quantizers.mxfp8.MXFP8Tensor'>
    """
    stored = StoredTensors(Path(directory), verify=verify)
    layout, bound = _layout(stored), bound_recipe(recipe, model)
    contents = contents_of(model, bound, None, None, rename, names_of_files=layout.names_of_files)
    load = _Load(model, stored, layout, contents, keep_quantized)
    load.prepare()
    with all_or_nothing(model), torch.no_grad():
        load.apply()
    load.tell()
    return load.loaded


def _layout(stored: StoredTensors) -> Layout:
    for layout in LAYOUTS.values():
        if layout.describes(stored.directory, stored.config):
            return layout
    method = stored.config.get("quantization_config", {}).get("quant_method")
    raise ValueError(f"{stored.directory} is quantized by the method {method!r}, which crossgrain does not read")


class _Load:
    """One load: everything is read, checked and made first, and put into the model at the end."""

    def __init__(
        self, model: nn.Module, stored: StoredTensors, layout: Layout, contents: Contents, keep_quantized: bool
    ) -> None:
        self.model, self.stored, self.layout, self.contents = model, stored, layout, contents
        self.keep_quantized = keep_quantized
        self.loaded: list[str] = []
        self._found: dict[int, list[tuple[ExportedWeight, Bytes]]] = {}  # by parameter
        self._rows: list[tuple[ExportedWeight, QuantizedTensor]] = []
        self._writes: list[tuple[str, Tensor, Tensor]] = []
        self._used: set[str] = set()
        self._rounded: list[str] = []

    # ---- reading -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Read and check everything. The model is not changed."""
        names = self.stored.names()
        for name, weight in self.contents.weights.items():
            if isinstance(self.layout, Plain):
                self._read_plain(name, _piece(weight))
            else:
                found = self._read_quantized(name, weight, names)
                self._found.setdefault(id(getattr(weight.module, weight.part.parameter)), []).append((weight, found))
                self.loaded.append(name)
        for parts in self._found.values():
            self._prepare_parameter(parts)
        for name, tensor in self.contents.plain.items():
            self._read_plain(name, tensor)
        unused = sorted(names - self._used - self._scales_of_inputs())
        if unused:
            more = " and more" if len(unused) > 5 else ""
            raise ValueError(
                f"{self.stored.directory} holds tensors that this model has no place for: {', '.join(unused[:5])}"
                f"{more}. Convert the model with a recipe that quantizes the same layers"
            )

    def _read_quantized(self, name: str, weight: ExportedWeight, names: set[str]) -> Bytes:
        if weight.format is None:
            raise ValueError(f"{name}: {weight.problem}")
        fmt, layout = weight.format, self.layout
        if kind_of(fmt) not in layout.kinds:
            raise ValueError(f"{name} is {fmt.name} in this model, which {layout.name} does not hold")
        key = self.contents.renamed(weight.key)
        tensors = layout.stack_names(key) if isinstance(layout, GptOss) else layout.consumed(name, fmt)
        missing = [part for part in tensors if part not in names]
        if tensors[0] in missing and name in names:
            raise ValueError(
                f"{name} is not quantized in {self.stored.directory}, or in another format, but the layer follows a "
                f"recipe that makes it {fmt.name}. Change the recipe, or leave the layer in high precision in it"
            )
        if missing:
            raise DamagedFileError(f"{self.stored.directory} has no tensor {missing[0]}, which this model needs")
        self._used.update(tensors)
        stored = self.stored.get(tensors)
        try:
            if isinstance(layout, GptOss):
                if weight.part.place is None:
                    raise ValueError("gpt-oss stores only stacks of experts quantized, and this is a layer of its own")
                found = layout.read_expert(key, weight.part.place, stored, fmt)
            else:
                if stored[tensors[0]].dim() != 2:
                    raise ValueError(f"it must be a matrix, got {list(stored[tensors[0]].shape)}")
                found = layout.read(name, stored, fmt, self.stored.amaxes.get(name))
            if found.shape != weight.shape:
                raise ValueError(f"it is {list(found.shape)} in the file, but {list(weight.shape)} in this model")
            check_finite(name, found)
        except ValueError as error:
            raise ValueError(f"{name} in {self.stored.directory} does not fit this model: {error}") from error
        return found

    def _read_plain(self, name: str, own: Tensor) -> None:
        where = self.stored.directory
        if name not in self.stored.names():
            raise DamagedFileError(f"{where} has no tensor {name}, which this model needs")
        self._used.add(name)
        value = self.stored.get([name])[name]
        if value.shape != own.shape and not (own.dim() == 0 and value.numel() == 1):
            raise ValueError(f"{name} has shape {list(value.shape)} in {where}, but {list(own.shape)} in this model")
        if value.is_floating_point() != own.is_floating_point() or value.element_size() == 1 != own.element_size():
            raise ValueError(f"{name} is {value.dtype} in {where}, but {own.dtype} in this model")
        self._writes.append((name, own, value.reshape(own.shape)))

    def _scales_of_inputs(self) -> set[str]:
        """Names of tensors that training does not need, because it computes them anew."""
        layers = [self.contents.layer(name) for name in self.contents.weights]
        return {f"{layer}.{extra}" for layer in layers for extra in ("input_scale", "input_global_scale")}

    def _prepare_parameter(self, parts: list[tuple[ExportedWeight, Bytes]]) -> None:
        first = parts[0][0]
        if self.keep_quantized:
            check_can_keep(first)
            self._rows.append((first, rows_tensor(first, [found for _, found in parts])))
            return
        for weight, found in parts:
            self._writes.append((weight.name, _piece(weight), kernels.decode(_plane(weight, found), torch.float32)))

    # ---- writing -------------------------------------------------------------------------------

    def apply(self) -> None:
        """Put everything into the model."""
        for weight, rows in self._rows:
            adopt(self.model, weight, rows)
        for name, own, value in self._writes:
            own.copy_(value)
            if not isinstance(own, QuantizedTensor) and not torch.equal(own.to(value.dtype).cpu(), value):
                self._rounded.append(name)
        for module in self.model.modules():
            if isinstance(module, QuantizedModule):
                module.clear_weight_cache()

    def tell(self) -> None:
        """Warn if numbers of the file were rounded to the dtypes of the model."""
        if self._rounded:
            warn(
                __name__,
                f"{len(self._rounded)} tensors of {self.stored.directory} do not fit exactly into the dtypes of this "
                f"model, and were rounded, {self._rounded[0]} first",
            )


def _plane(weight: ExportedWeight, found: Bytes) -> Plane:
    try:
        return plane_from(found)
    except ValueError as error:
        raise ValueError(f"{weight.name}: {error}") from error


def _piece(weight: ExportedWeight) -> Tensor:
    """The part of a plain parameter that a weight is, as [out, in]; writing to it changes the parameter."""
    parameter = getattr(weight.module, weight.part.parameter).detach()
    if weight.part.place is not None:
        parameter = parameter[weight.part.place]
    piece: Tensor = parameter.t() if weight.part.transposed else parameter
    return piece if piece.shape[0] == weight.shape[0] else piece[weight.part.start : weight.part.stop]
