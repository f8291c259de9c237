"""Make parameters that are kept quantized from stored bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..linear.padding import Sizes
from ..nn import QuantizedModule
from ..nn.linear import SingleLinear
from ..ops import Linear as LinearOperation
from ..planes import ROWWISE
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..tensor import QuantizedTensor
from ..tensor.storage import copy_plane
from .layout import plane_from
from .walk import Bytes, ExportedWeight, gemm_weight

_DECODE = "Load it with keep_quantized=False, which decodes the weights into the parameters"


def check_can_keep(weight: ExportedWeight) -> None:
    """Raise ValueError if the parameter of a weight cannot be kept quantized."""
    module, label = weight.module, weight.name
    if weight.part.transposed:
        raise ValueError(f"{label}: a weight that is stored as [in, out] cannot be kept quantized. {_DECODE}")
    if isinstance(module, SingleLinear) and len(module.weight_names) > 1:
        raise ValueError(f"{label}: a weight of several parameters cannot be kept quantized. {_DECODE}")
    if weight.recipe is None:
        return
    rows, columns = gemm_weight(module, weight.part.gemm).shape
    details = module._build_quantizers(weight.recipe).details
    padding = details[weight.part.gemm].padding if isinstance(details, list) else details
    padded = padding.padded(Sizes(0, columns, rows), backward=True)
    if (padded.n, padded.k) != (rows, columns):
        raise ValueError(
            f"{label}: the formats of this recipe pad the weight {[rows, columns]} to {[padded.n, padded.k]}, so it "
            f"cannot be kept quantized. {_DECODE}"
        )


def rows_tensor(weight: ExportedWeight, parts: list[Bytes]) -> QuantizedTensor:
    """A tensor with only a rowwise plane, which has the bytes of all weights of a parameter.

    Raises:
        ValueError: the weights of a stack have different global scales, or the layer makes other planes.
    """
    found = parts[0] if len(parts) == 1 else _stacked(weight, parts)
    try:
        plane = plane_from(found)
    except ValueError as error:
        raise ValueError(f"{weight.name}: {error}") from error
    quantizer = _weight_quantizer(weight)
    row = (quantizer.child(ROWWISE) if isinstance(quantizer, HybridQuantizer) else quantizer).copy()
    row.set_usage(rowwise=True, columnwise=False)
    row.internal = False
    # Its nominal dtype is float32, so that columns which are quantized from it see the exact numbers.
    device = getattr(weight.module, weight.part.parameter).device
    rows: QuantizedTensor = row.make_empty(plane.shape, dtype=torch.float32, device=device)
    own = rows.plane(ROWWISE)
    if own is None or own.format != plane.format:
        raise ValueError(f"{weight.name}: the weight quantizer of this recipe does not make {plane.format.name}")
    copy_plane(own, plane)
    return rows


def _stacked(weight: ExportedWeight, parts: list[Bytes]) -> Bytes:
    first = parts[0]
    amaxes = [part.amax for part in parts if part.amax is not None]
    scales = torch.cat([part.scales for part in parts])
    if first.format.block is None:
        amaxes, scales = [part.scales for part in parts], first.scales
    if any(not torch.equal(amax, amaxes[0]) for amax in amaxes):
        raise ValueError(
            f"{weight.name}: the weights of this stack have scales of their own, and one parameter that is kept "
            f"quantized in {first.format.name} has one for all. {_DECODE}"
        )
    shape = (sum(part.shape[0] for part in parts), first.shape[1])
    return Bytes(torch.cat([part.codes for part in parts]), scales, first.amax, first.format, shape)


def _weight_quantizer(weight: ExportedWeight) -> Quantizer:
    module, kept = weight.module, getattr(weight.module, weight.part.parameter)
    if isinstance(kept, QuantizedTensor):
        own: Any = kept._get_quantizer()
        return own  # type: ignore[no-any-return]
    built = module._build_quantizers(weight.recipe)
    quantizer: Quantizer = module._weight_quantizers(built.quantizers)[weight.part.parameter]
    if weight.recipe is not None and weight.recipe.backward_override is not None:
        quantizer.set_usage(columnwise=False)  # backward decodes the rows
    return quantizer


def adopt(model: nn.Module, weight: ExportedWeight, rows: QuantizedTensor) -> None:
    """Write the bytes of ``rows`` to the parameter of a weight, which is replaced if it is in high precision."""
    old: Any = getattr(weight.module, weight.part.parameter)
    if isinstance(old, QuantizedTensor):
        _write(old, rows, weight.name)
        return
    made = _weight_quantizer(weight).make_empty(tuple(old.shape), dtype=old.dtype, device=old.device)
    _write(made, rows, weight.name)
    new = nn.Parameter(made, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        setattr(new, name, value)  # what users hung on the parameter
    for module, name in _owners(model, old):
        setattr(module, name, new)


def _write(tensor: QuantizedTensor, rows: QuantizedTensor, label: str) -> None:
    if not tensor._copy_bytes_from(rows):
        raise ValueError(f"{label}: the parameter has no rowwise plane of the format in the file")


def _owners(model: nn.Module, parameter: Tensor) -> list[tuple[nn.Module, str]]:
    """The quantized modules that hold a parameter; an embedding that is tied to it keeps its numbers."""
    return [
        (module, name)
        for module in model.modules()
        for name, own in module._parameters.items()
        if own is parameter and isinstance(module, QuantizedModule | LinearOperation)
    ]
