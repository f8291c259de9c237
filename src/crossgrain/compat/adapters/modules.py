"""Functions around modules that clients call."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn.base import QuantizedModule
from ...quantizers.base import Quantizer
from ...runtime.devices import accelerator
from ...tensor import QuantizedTensor, QuantizedTensorStorage

TransformerEngineBaseModule = QuantizedModule

_dummies: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}


class UserBufferQuantizationMode(enum.Enum):
    """How communication buffers are quantized; not used here."""

    NONE = "none"
    FP8 = "fp8"


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """A tensor to give to autograd instead of a weight gradient that is stored elsewhere; shared by equal shapes."""
    key = (tuple(shape), dtype)
    if key not in _dummies:
        _dummies[key] = torch.zeros(key[0], dtype=dtype, device=accelerator())
    dummy = _dummies[key]
    if zero:
        dummy.zero_()
    return dummy.detach()


def get_workspace() -> Tensor:
    """An empty tensor: GEMMs manage their own memory."""
    return torch.empty(0, dtype=torch.uint8, device=accelerator())


def is_module_grouped_tensor_path_supported(recipe: Any, dtype: torch.dtype) -> bool:
    """Always False: groups are multiplied one by one here."""
    return False


def noop_cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; a single tensor is returned unchanged."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=dim)


def quantize_weight(
    *,
    tensor: Tensor | None = None,
    quantizer: Quantizer | None = None,
    workspace: QuantizedTensorStorage | None = None,
    update_workspace: bool = True,
    skip_update_flag: Tensor | None = None,
    fsdp_group: Any = None,
    workspace_dtype: torch.dtype | None = None,
    cache: bool = False,
) -> tuple[Any, QuantizedTensorStorage | None]:
    """Return a quantized weight for a GEMM, and the copy to keep if ``cache`` is set and a new one was made.

    Args:
        tensor: the weight; one that is quantized already is used itself. None to use ``workspace`` as it is.
        quantizer: needed unless the weight is quantized.
        workspace: an earlier copy to use. It is replaced if it lacks a direction that the quantizer makes.
        update_workspace: write the weight to ``workspace`` again.
        skip_update_flag: if it is not zero, ``workspace`` is not written.
        fsdp_group: ignored.
        workspace_dtype: nominal dtype of a new copy.
        cache: return a new copy as the second result too.
    """
    if tensor is None:
        if workspace is None:
            raise ValueError("quantize_weight: there is no weight: tensor and workspace are both None")
        return workspace, None
    if isinstance(tensor, QuantizedTensor):
        if quantizer is not None:
            have, wanted = tensor.get_usages(), quantizer.get_usages()
            missing = {f"{name}_usage": True for name, want in wanted.items() if want and not have[name]}
            if missing:
                tensor.update_usage(**missing)
        return tensor, None
    if quantizer is None:
        raise ValueError("quantize_weight: a weight that is not quantized needs a quantizer, but quantizer is None")
    if workspace is not None:
        have = workspace.get_usages()
        if all(have[name] for name, want in quantizer.get_usages().items() if want):
            if update_workspace:
                quantizer.update_quantized(tensor, workspace, noop_flag=skip_update_flag)
            return workspace, None
    made = quantizer.quantize(tensor, dtype=workspace_dtype)
    return made, made if cache else None
