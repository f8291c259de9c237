"""`load_exported`: load a model in the layout of another program into a model that trains.

The rowwise plane of a weight gets the stored codes and scales, byte for byte. Its columnwise plane, which no such layout
stores, is the same numbers transposed if that is exact (per-tensor scales, square tiles); otherwise the decoded rowwise
plane is quantized by the columnwise quantizer of the weight.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..convert.layers import ConvertedConv1D
from ..files.manifest import DamagedFileError
from ..files.undo import all_or_nothing
from ..linear.padding import Sizes
from ..nn import QuantizedModule
from ..planes import ROWWISE, Plane
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..recipe import Recipe
from ..tensor import QuantizedTensor
from ..tensor.storage import copy_plane
from .checks import check_finite, kind_of
from .contents import Contents, Rename, contents_of
from .gpt_oss import GptOss
from .layout import Layout, plane_from
from .layouts import LAYOUTS
from .plain import Plain
from .reading import StoredTensors
from .walk import ExportedWeight
from .writing import _bound


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
    """
    stored = StoredTensors(Path(directory), verify=verify)
    layout = _layout(stored)
    contents = contents_of(model, _bound(recipe, model), None, {}, rename)
    load = _Load(model, stored, layout, contents, keep_quantized)
    load.prepare()
    with all_or_nothing(model), torch.no_grad():
        load.apply()
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
        self._planes: dict[tuple[Any, str], list[tuple[ExportedWeight, Plane]]] = {}
        self._parameters: list[tuple[Any, str, QuantizedTensor]] = []
        self._writes: list[tuple[Tensor, Tensor]] = []
        self._used: set[str] = set()

    def prepare(self) -> None:
        names = self.stored.names()
        for name, weight in self.contents.weights.items():
            if isinstance(self.layout, Plain):
                self._read_plain(name, _piece(weight), weight)
                continue
            if weight.format is None:
                raise ValueError(f"{name}: {weight.problem}")
            tensors = self._consumed(weight, name)
            if tensors[0] not in names or any(part not in names for part in tensors):
                self._refuse_missing(name, tensors, names)
            self._used.update(tensors)
            plane = self._plane(name, weight, tensors)
            self._planes.setdefault((weight.module, weight.part.parameter), []).append((weight, plane))
            self.loaded.append(name)
        for (module, parameter), planes in self._planes.items():
            self._prepare_parameter(module, parameter, planes)
        for name, tensor in self.contents.plain.items():
            self._read_plain(name, tensor, None)
        unused = sorted(names - self._used - self._expected_extras())
        if unused:
            raise ValueError(
                f"{self.stored.directory} holds tensors that this model has no place for: {', '.join(unused[:5])}"
                f"{' and more' if len(unused) > 5 else ''}. Convert the model with a recipe that quantizes the same layers"
            )

    def _consumed(self, weight: ExportedWeight, name: str) -> list[str]:
        assert weight.format is not None
        fmt = weight.format
        if kind_of(fmt) not in self.layout.kinds:
            raise ValueError(f"{name} is {fmt.name} in this model, which {self.layout.name} does not hold")
        if isinstance(self.layout, GptOss):
            key = self.contents.renamed(weight.key)
            return [f"{key}_blocks", f"{key}_scales"]
        return self.layout.consumed(weight, name, fmt)

    def _refuse_missing(self, name: str, tensors: list[str], names: set[str]) -> None:
        missing = [part for part in tensors if part not in names]
        if name in names and tensors[0] in missing:
            raise ValueError(
                f"{name} is not quantized in {self.stored.directory}, or in another format, but the layer follows a "
                "recipe that quantizes it. Leave the layer in high precision in the recipe"
            )
        raise DamagedFileError(f"{self.stored.directory} has no tensor {missing[0]}, which this model needs")

    def _plane(self, name: str, weight: ExportedWeight, tensors: list[str]) -> Plane:
        assert weight.format is not None
        stored, fmt = self.stored.get(tensors), weight.format
        try:
            if isinstance(self.layout, GptOss):
                assert weight.part.index is not None
                found = self.layout.read_expert(
                    self.contents.renamed(weight.key), weight.part.index, stored, fmt
                )
            else:
                if stored[tensors[0]].dim() != 2:
                    raise ValueError(f"it must be a matrix, got {list(stored[tensors[0]].shape)}")
                found = self.layout.read(name, stored, fmt, self.stored.amaxes.get(name))
            if found.shape != weight.shape:
                raise ValueError(f"it is {list(found.shape)} in the file, but {list(weight.shape)} in this model")
            check_finite(name, found)
            return plane_from(found)
        except ValueError as error:
            raise ValueError(f"{name} in {self.stored.directory} does not fit this model: {error}") from error

    def _expected_extras(self) -> set[str]:
        """Scales of inputs, which training computes anew."""
        layers = [self.contents.layer(name) for name in self.contents.weights]
        return {f"{layer}.{extra}" for layer in layers for extra in ("input_scale", "input_global_scale")}

    def _read_plain(self, name: str, own: Tensor, weight: ExportedWeight | None) -> None:
        if name not in self.stored.names():
            raise DamagedFileError(f"{self.stored.directory} has no tensor {name}, which this model needs")
        self._used.add(name)
        value = self.stored.get([name])[name]
        if value.shape != own.shape and not (own.dim() == 0 and value.numel() == 1):
            raise ValueError(
                f"{name} has shape {list(value.shape)} in {self.stored.directory}, but {list(own.shape)} in this model"
            )
        if value.is_floating_point() != own.is_floating_point():
            raise ValueError(f"{name} is {value.dtype} in {self.stored.directory}, but {own.dtype} in this model")
        self._writes.append((own, value.reshape(own.shape)))

    # ---- parameters ----------------------------------------------------------------------------

    def _prepare_parameter(self, module: Any, name: str, planes: list[tuple[ExportedWeight, Plane]]) -> None:
        old = getattr(module, name)
        if not self.keep_quantized:
            for weight, plane in planes:
                self._writes.append((_piece(weight), kernels.decode(plane, torch.float32)))
            return
        label = planes[0][0].name
        if isinstance(module, ConvertedConv1D) or planes[0][0].part.transposed:
            raise ValueError(f"{label}: a weight that is stored as [in, out] cannot be kept quantized; {_DECODE}")
        if planes[0][0].part.index is not None:
            raise ValueError(
                f"{label}: a stack of weights in one parameter cannot be kept quantized from separate planes; {_DECODE}"
            )
        if len(module.weight_names) > 1 and len({w.part.gemm for w, _ in planes}) < len(planes):
            raise ValueError(f"{label}: a weight that consists of several parameters cannot be kept quantized; {_DECODE}")
        ((weight, plane),) = planes
        quantizer = _weight_quantizer(weight)
        padded = _padded(weight)
        if padded != weight.shape:
            raise ValueError(
                f"{label}: the formats of this recipe pad the weight {list(weight.shape)} to {list(padded)}, so it "
                f"cannot be kept quantized; {_DECODE}"
            )
        self._parameters.append((module, name, _quantized(quantizer, plane, old, label)))

    def apply(self) -> None:
        """Put everything into the model."""
        for module, name, quantized in self._parameters:
            old = getattr(module, name)
            new: Any = nn.Parameter(quantized, requires_grad=old.requires_grad)
            for owner, owned in _owners(self.model, old):
                setattr(owner, owned, new)
        for module in {id(module): module for module in self.model.modules()}.values():
            if isinstance(module, QuantizedModule):
                module.clear_weight_cache()
        for own, value in self._writes:
            own.copy_(value)


_DECODE = "load it with keep_quantized=False, which decodes the weights into the parameters"


def _piece(weight: ExportedWeight) -> Tensor:
    """The part of a plain parameter that a weight is, as [out, in]; writing to it changes the parameter."""
    parameter = getattr(weight.module, weight.part.parameter).detach()
    if weight.part.index is not None:
        parameter = parameter[weight.part.index]
    piece: Tensor = parameter.t() if weight.part.transposed else parameter
    return piece


def _weight_quantizer(weight: ExportedWeight) -> Quantizer:
    module = weight.module
    kept = getattr(module, weight.part.parameter)
    if isinstance(kept, QuantizedTensor):
        own: Quantizer = kept._get_quantizer()
        return own
    built = module._build_quantizers(module.bound_recipe)
    quantizer: Quantizer = module._weight_quantizers(built.quantizers)[weight.part.parameter]
    return quantizer


def _padded(weight: ExportedWeight) -> tuple[int, int]:
    module = weight.module
    if module.bound_recipe is None:
        return weight.shape
    details = module._build_quantizers(module.bound_recipe).details
    padding = details[weight.part.gemm].padding if isinstance(details, list) else details
    sizes = padding.padded(Sizes(0, weight.shape[1], weight.shape[0]), backward=True)
    return (sizes.n, sizes.k)


def _quantized(quantizer: Quantizer, plane: Plane, old: Any, label: str) -> QuantizedTensor:
    """A quantized tensor with the bytes of ``plane`` as its rows, and columns that are made from them."""
    row = (quantizer.child(ROWWISE) if isinstance(quantizer, HybridQuantizer) else quantizer).copy()
    row.set_usage(rowwise=True, columnwise=False)
    row.internal = False
    rows = row.make_empty(plane.shape, dtype=torch.float32, device=old.device)
    own = rows.plane(ROWWISE)
    if own is None or own.format != plane.format:
        raise ValueError(f"{label}: the weight quantizer of this recipe makes other planes than {plane.format.name}")
    copy_plane(own, plane)
    made: QuantizedTensor = quantizer.make_empty(tuple(old.shape), dtype=old.dtype, device=old.device)
    if not made._copy_bytes_from(rows):
        raise ValueError(f"{label}: the weight quantizer of this recipe makes other planes than {plane.format.name}")
    return made


def _owners(model: nn.Module, parameter: Tensor) -> list[tuple[nn.Module, str]]:
    """The quantized modules that hold a parameter."""
    return [
        (module, name)
        for module in model.modules()
        for name, own in module._parameters.items()
        if own is parameter and isinstance(module, QuantizedModule)
    ]
