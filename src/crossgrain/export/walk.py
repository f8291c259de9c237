"""Find the weights of a model that are multiplied quantized, and make the planes that fprop multiplies.

A module may have several such weights: two in an MLP, one per expert in a grouped layer. The weight of one GEMM may
also consist of several parameters, and one parameter may hold the weights of many GEMMs, stacked:

    Linear                         weight [out, in]                    one GEMM, one weight
    Linear with parameters_split   query_weight, key_weight, ...       one GEMM, its rows are several weights
    GroupedLinear                  weight0, weight1, ...               a GEMM and a weight for each group
    GroupedLinear, single weight   weight [groups, out, in]            a GEMM and a weight for each group
    converted experts              gate_up_proj, down_proj             the same, perhaps as [groups, in, out]

Nothing is quantized while the weights are listed; `ExportedWeight.read` does it, for one weight at a time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..convert.layers import ConvertedConv1D
from ..convert.projections import ConvertedProjections
from ..formats import Format
from ..linear.operands import weight_matrix
from ..linear.padding import NO_PADDING, Padding, Sizes, known_format
from ..nn import QuantizedModule
from ..nn.grouped_parameters import GroupedParameters
from ..nn.linear import SingleLinear
from ..nn.linear_module import LinearModule
from ..ops import Linear as LinearOperation
from ..ops.basic.linear import BasicLinear
from ..planes import ROWWISE, Plane
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..recipe import Recipe
from ..recipe.projections import Projection
from ..runtime.random_numbers import forked_generators
from ..tensor import QuantizedTensor
from ..tensor.sharding import is_sharded


class Part(NamedTuple):
    """Which part of a GEMM's weight a tensor for other programs is.

    Attributes:
        name: what follows the path of the module: ``weight``, ``3.weight``, ``fc1.weight``.
        parameter: name of the parameter that holds it.
        place: position in the first dimension of that parameter, if it is a stack; otherwise None.
        gemm: index of the GEMM in the module.
        start: first row of the GEMM's weight.
        stop: row after the last one.
        transposed: the parameter holds it as [in, out].
    """

    name: str
    parameter: str
    place: int | None
    gemm: int
    start: int
    stop: int
    transposed: bool = False


class Bytes(NamedTuple):
    """The stored bytes of a weight [out, in], without padding.

    Attributes:
        codes: uint8 [out, bytes of a row].
        scales: one row per row of the weight, or per row of tiles; one number for formats without blocks.
        amax: fp32, one number; None for formats without a global amax.
        format: what the bytes mean.
        shape: (out, in).
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor | None
    format: Format
    shape: tuple[int, int]


@dataclass(frozen=True)
class ExportedWeight:
    """A weight of a GEMM that is multiplied quantized.

    Attributes:
        path: path of its module.
        part: which part of the module it is.
        module: the module.
        format: the format of its rowwise plane; None if it has none, or if only its quantizer knows.
        shape: (out, in).
        problem: why its rowwise plane is not known; None if it is.
        recipe: the recipe that the layer follows.
        alias: another name for other programs than that which follows from the path.
    """

    path: str
    part: Part
    module: Any
    format: Format | None
    shape: tuple[int, int]
    problem: str | None
    recipe: Recipe | None
    _plane: Callable[[], Plane]
    alias: str | None = None

    @property
    def name(self) -> str:
        """The name for other programs; it ends with ``weight``."""
        if self.alias is not None:
            return self.alias
        return f"{self.path}.{self.part.name}" if self.path else self.part.name

    @property
    def key(self) -> str:
        """The key of its parameter in the state dict."""
        return f"{self.path}.{self.part.parameter}" if self.path else self.part.parameter

    def piece(self, name: str, start: int, stop: int) -> ExportedWeight:
        """Some rows of this weight, as a weight of another name."""
        part = self.part._replace(start=self.part.start + start, stop=self.part.start + stop)
        return replace(self, part=part, shape=(stop - start, self.shape[1]), alias=name)

    def read(self) -> Bytes:
        """The bytes of the rowwise plane, which is quantized now if the weight is not kept quantized."""
        plane = self._plane()
        plane.check_readable()
        return bytes_of(plane, self.part.start, self.shape)


def bytes_of(plane: Plane, start: int, shape: tuple[int, int]) -> Bytes:
    """The bytes of ``shape`` rows and columns of a rowwise plane, from row ``start``, without padding."""
    fmt, (rows, columns) = plane.format, shape
    assert fmt.element is not None
    codes = plane.operand_codes()[start : start + rows, : columns * fmt.element.bits // 8]
    scales = plane.operand_scales()
    if fmt.block is not None:
        tall = 1 if fmt.layout.replicated else fmt.block_rows
        first, last = start // tall, math.ceil((start + rows) / tall)
        scales = scales[first:last, : math.ceil(columns / fmt.block_length)]
    amax = None if plane.amax is None else plane.amax.to("cpu", copy=True)
    # Copies: planes of one parameter may be exported under two names, and files refuse tensors that share memory.
    codes, scales = (part.to("cpu", copy=True).contiguous() for part in (codes, scales))
    return Bytes(codes, scales, amax, fmt, shape)


def quantized_weights(model: nn.Module, recipe: Recipe | None) -> list[ExportedWeight]:
    """All weights of a model that its layers multiply quantized in fprop, in the order of the model.

    Args:
        model: the model.
        recipe: the recipe of layers that are bound to none; None if these compute in high precision.

    Raises:
        ValueError: weights are sharded, belong to one of several ranks, or have no values yet.
        TypeError: a module with quantized weights is of a kind that cannot be exported.
    """
    found: list[ExportedWeight] = []
    latest = _Latest()
    for path, module in model.named_modules(remove_duplicate=False):
        inner: Any = module.basic_ops[0] if isinstance(module, LinearOperation) else module
        if not isinstance(inner, QuantizedModule) or not inner.weight_names:
            continue
        bound = inner.bound_recipe or recipe
        _check_module(path, inner, bound)
        if bound is None and not inner.primary_weights_in_fp8:
            continue
        found.extend(_weights_of(path, inner, bound, latest))
    return found


def _check_module(path: str, module: Any, recipe: Recipe | None) -> None:
    ranks = getattr(module, "tp_size", getattr(module, "tensor_parallel_size", 1))
    parameters = [getattr(module, name) for name in module.weight_names]
    if ranks > 1 or any(map(is_sharded, parameters)):
        raise ValueError(
            f"{path}: this process has only a part of the weight. Save a distributed checkpoint, load it into a model "
            "of one process, and export that"
        )
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError(f"{path}: the weight is on the meta device, so it has no values to export")
    if not isinstance(module, LinearModule | BasicLinear) and (recipe is not None or module.primary_weights_in_fp8):
        raise TypeError(f"{path}: the weights of a {type(module).__name__} cannot be exported")


class _Latest:
    """The plane that was made last: parts of one GEMM, which follow each other, share it."""

    gemm: Any = None
    plane: Plane | None = None

    def get(self, gemm: Any, make: Callable[[], Plane]) -> Plane:
        if self.plane is None or self.gemm != gemm:
            self.gemm, self.plane = gemm, make()
        return self.plane


def _weights_of(path: str, module: Any, recipe: Recipe | None, latest: _Latest) -> Iterator[ExportedWeight]:
    for part in parts_of(module):
        weight = _kept(module, part)
        quantizer, padding = (None, NO_PADDING) if recipe is None else _quantizer(module, part.gemm, recipe)
        shape = (part.stop - part.start, module_columns(module, part))
        problem, fmt = _why_no_layer(module, path, part), None
        if weight is not None:
            plane = weight.plane(ROWWISE)
            if plane is None:
                problem = (
                    "it has only a columnwise plane, and fprop multiplies the rowwise plane. Make the rowwise plane: "
                    "weight.update_usage(rowwise_usage=True) if that is exact, otherwise crossgrain.requantize_"
                )
            else:
                fmt = plane.format
        elif quantizer is not None:
            problem = problem or _why_unknown(quantizer)
            fmt = known_format(quantizer, ROWWISE)
            if fmt is not None and fmt.is_identity:
                continue
        else:
            continue
        if fmt is not None and fmt.is_identity:
            continue

        def plane_of_gemm(part: Part = part, quantizer: Any = quantizer, padding: Padding = padding) -> Plane:
            return latest.get((id(module), part.gemm), lambda: _plane(module, part, quantizer, padding))

        yield ExportedWeight(path, part, module, fmt, shape, problem, recipe, plane_of_gemm)


def _why_no_layer(module: Any, path: str, part: Part) -> str | None:
    """Why other programs have no quantized layer for a weight; None if it is of a linear layer or of experts."""
    if not isinstance(module, ConvertedProjections) or part.place is not None:
        return None
    parameter = getattr(module, part.parameter)
    if part.parameter == "weight" and parameter.dim() == 2:
        return None
    cls = vars(module)["_was"][0].__name__
    return (
        f"engines have quantized linear layers and experts, but no quantized {cls}. Train with it in high precision: "
        f"crossgrain.convert(model, recipe, skip={cls})"
    )


def parts_of(module: Any) -> list[Part]:
    """The weights of a module, as tensors for other programs.

    A module may have a method ``exported_weights()`` that returns such parts, as plain tuples.
    """
    if hasattr(module, "exported_weights"):
        return [Part(*part) for part in module.exported_weights()]
    if isinstance(module, ConvertedProjections):
        return [part for projection, first in module._layers() for part in _projected_parts(module, projection, first)]
    if isinstance(module, GroupedParameters):
        stacked, rows = module.single_grouped_weight, module.out_features
        return [
            Part(f"{g}.weight", "weight" if stacked else f"weight{g}", g if stacked else None, g, 0, rows)
            for g in range(module._groups)
        ]
    if isinstance(module, SingleLinear):
        parts, start = [], 0
        for name, rows in zip(module.weight_names, module._splits.values(), strict=True):
            transposed = isinstance(module, ConvertedConv1D)
            parts.append(Part(plain_name(name), name, None, 0, start, start + rows, transposed))
            start += rows
        return parts
    return [
        Part(plain_name(name), name, None, i, 0, getattr(module, name).shape[0])
        for i, name in enumerate(module.weight_names)
    ]


def _projected_parts(module: ConvertedProjections, projection: Projection, first: int) -> list[Part]:
    """The weights of a projection: one, or one for each group of a stack."""
    rows, parameter, transposed = projection.matrices(module).shape[-2], projection.weight, projection.transposed
    if not projection.groups:
        return [Part(plain_name(parameter), parameter, None, first, 0, rows, transposed)]
    return [
        Part(f"{projection.name}.{g}.weight", parameter, g, first + g, 0, rows, transposed)
        for g in range(projection.groups)
    ]


def plain_name(parameter: str) -> str:
    """The name of a parameter as that of a layer of its own: ``fc1_weight`` becomes ``fc1.weight``."""
    for kind in ("weight", "bias"):
        if parameter.endswith(f"_{kind}"):
            return f"{parameter.removesuffix(f'_{kind}')}.{kind}"
    return parameter


def module_columns(module: Any, part: Part) -> int:
    """The number of columns of a weight [out, in]."""
    return gemm_weight(module, part.gemm).shape[-1]


def bias_names(module: Any) -> dict[str, list[str]]:
    """Names of the biases of a module for other programs, by parameter: several, if it is a stack."""
    if isinstance(module, GroupedParameters):
        if module._biased and module.single_grouped_bias:
            return {"bias": [f"{g}.bias" for g in range(module._groups)]}
        return {f"bias{g}": [f"{g}.bias"] for g in range(module._groups) if module._biased}
    if isinstance(module, ConvertedProjections):
        return {}  # they stay under their own keys: files of transformers have stacks of biases, too
    names = getattr(module, "bias_names", [])
    return {name: [plain_name(name)] for name in names if getattr(module, name, None) is not None}


def gemm_weight(module: Any, gemm: int) -> Tensor:
    """The weight [out, in] of a GEMM, plain or kept quantized."""
    if isinstance(module, ConvertedProjections):
        return module.gemm_weight(gemm)
    if isinstance(module, GroupedParameters):
        return module._group_weights()[gemm]
    if isinstance(module, SingleLinear):
        return module._weight(module._parameters_of_weight())
    named: Tensor = getattr(module, module.weight_names[gemm])
    return named


def _kept(module: Any, part: Part) -> QuantizedTensor | None:
    """The weight of a GEMM, if it is kept quantized."""
    if not isinstance(getattr(module, part.parameter), QuantizedTensor):
        return None
    weight = gemm_weight(module, part.gemm)
    assert isinstance(weight, QuantizedTensor)
    return weight


def _quantizer(module: Any, gemm: int, recipe: Recipe) -> tuple[Quantizer, Padding]:
    built = module._build_quantizers(recipe, backward=False)
    quantizer = module._gemm_operands(built.quantizers)[gemm]["weight"]
    padding = built.details if isinstance(module, BasicLinear) else built.details[gemm].padding
    return quantizer, padding


def _why_unknown(quantizer: Quantizer) -> str | None:
    row = quantizer.child(ROWWISE) if isinstance(quantizer, HybridQuantizer) else quantizer
    if row.custom or not row.makes_planes:
        return f"its quantizer {type(row).__name__} is your own, so the format of its bytes is not known"
    if row.encoding(ROWWISE).stochastic:
        return (
            "its weight is rounded stochastically in fprop, so every step multiplies other numbers. Remove `sr` from "
            "fprop in the recipe"
        )
    return None


def _plane(module: Any, part: Part, quantizer: Quantizer | None, padding: Padding) -> Plane:
    """The rowwise plane that fprop multiplies."""
    weight = gemm_weight(module, part.gemm)
    if isinstance(weight, QuantizedTensor):
        plane = weight.plane(ROWWISE)
        assert plane is not None
        return plane
    assert quantizer is not None
    if not bool(weight.isfinite().all()):
        raise ValueError(
            f"{module.layer}: the weight holds NaNs or infinities, which most formats cannot show; it is not exported"
        )
    rows, columns = weight.shape
    padded = padding.padded(Sizes(0, columns, rows), backward=True)
    # A copy, because quantizers of delayed scaling record what they see; the export must not change the next step.
    quantizer = copy.deepcopy(quantizer)
    with torch.no_grad(), forked_generators():
        made = quantizer.make_planes(weight_matrix(weight, padded), rowwise=True, columnwise=False).plane(ROWWISE)
    assert made is not None
    return made
