"""`Layout`: what the layouts of other programs have in common, and helpers to store and read bytes of planes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..formats import Format
from ..kernels.reference.scaling import global_scale
from ..planes import ROWWISE, Plane, empty_plane
from .checks import NVFP4, check_weights, kind_of
from .contents import Contents
from .walk import Bytes

_PREFIX = "crossgrain."
AMAX = f"{_PREFIX}amax"
"""Key in the metadata of files: the exact amaxes of NVFP4 tensors, of which layouts store a rounded reciprocal."""


class Layout:
    """How a model is stored for another program.

    Attributes:
        name: what users call it.
        kinds: the families of formats that it holds; see `checks.kind_of`.
        names_of_files: models of transformers get the names of Hugging Face's files.
    """

    name: ClassVar[str]
    names_of_files: ClassVar[bool] = True
    kinds: ClassVar[frozenset[str]]

    def check(self, contents: Contents) -> None:
        """Raise ValueError if the layout cannot hold the model. Nothing has been written."""
        if not contents.weights:
            raise ValueError(
                f"no layer of this model is quantized in fprop, so there is nothing to store as {self.name}: convert "
                "the model first, pass recipe= if it runs in an autocast, or export it with format='plain'"
            )
        check_weights(list(contents.weights.values()), self.kinds, self.name)

    def tensors(self, name: str, found: Bytes, contents: Contents) -> dict[str, Tensor]:
        """The tensors that are stored for a quantized weight."""
        raise NotImplementedError

    def files(self, contents: Contents) -> dict[str, Mapping[str, Any]]:
        """The JSON files to write, by name; ``config.json`` is ``contents.config`` and what is added here."""
        raise NotImplementedError

    def describes(self, directory: Path, config: Mapping[str, Any]) -> bool:
        """Whether a directory with this ``config.json`` has this layout."""
        raise NotImplementedError

    def consumed(self, name: str, fmt: Format) -> list[str]:
        """The names of the tensors that `read` takes for a weight. The first is there only if it is quantized."""
        raise NotImplementedError

    def read(self, name: str, stored: Mapping[str, Tensor], fmt: Format, amax: float | None) -> Bytes:
        """The bytes of a weight in the format ``fmt``.

        Args:
            name: name of the weight.
            stored: the tensors that `consumed` names.
            fmt: the format of the weight in the model.
            amax: the exact amax, if the file tells it.

        Raises:
            ValueError: the tensors are not what the layout stores for this format.
        """
        raise NotImplementedError


def as_e4m3(data: Tensor) -> Tensor:
    """Bytes as E4M3 numbers."""
    return data.contiguous().view(torch.float8_e4m3fn)


def global_encode_scale(found: Bytes) -> Tensor:
    """The fp32 number by which NVFP4 weights are multiplied before their block scales are chosen."""
    assert found.amax is not None
    return global_scale(found.amax.reshape(1).cpu(), found.format).encode


def global_decode_scale(found: Bytes) -> Tensor:
    """The fp32 number by which decoded NVFP4 weights are multiplied: amax / (6 · 448), rounded once."""
    assert found.amax is not None and found.format.element is not None
    amax = found.amax.reshape(1).cpu()
    target = torch.tensor([found.format.element.max * found.format.scale_bound])
    return torch.where(amax == 0, 1.0, amax / target)


def amax_from(scale: Tensor, fmt: Format, exact: float | None, *, reciprocal: bool) -> Tensor:
    """The amax of an NVFP4 tensor from its stored scale; the ``exact`` one if it belongs to that scale."""
    assert fmt.element is not None
    scale = scale.reshape(1).float()
    if exact is not None:
        amax = torch.tensor([exact], dtype=torch.float32)
        about = Bytes(scale, scale, amax, fmt, (0, 0))
        if torch.equal(global_encode_scale(about) if reciprocal else global_decode_scale(about), scale):
            return amax
    if not bool((scale > 0).all() & scale.isfinite().all()):
        raise ValueError(f"its global scale must be a finite number above 0, got {scale.item()}")
    target = torch.tensor([fmt.element.max * fmt.scale_bound])
    return target / scale if reciprocal else scale * target


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return ``tensor``; raise ValueError if it has another dtype or shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has dtype {tensor.dtype} and shape {list(tensor.shape)}, but this model needs {dtype} and "
            f"{list(shape)}"
        )
    return tensor


def expect_one(name: str, tensor: Tensor) -> Tensor:
    """Return ``tensor``, which must be one fp32 number, as a vector."""
    if tensor.dtype != torch.float32 or tensor.numel() != 1:
        raise ValueError(f"{name} must be one float32 number, got {tensor.dtype} of shape {list(tensor.shape)}")
    return tensor.reshape(1)


def plane_from(found: Bytes) -> Plane:
    """A rowwise plane with the bytes of a weight."""
    fmt = found.format
    plane = empty_plane(fmt, ROWWISE, found.shape, device=torch.device("cpu"))
    plane.operand_codes().copy_(found.codes)
    plane.operand_scales().copy_(found.scales)
    if plane.amax is not None and found.amax is not None:
        plane.amax.copy_(found.amax)
    if fmt.block_rows > 1 and fmt.layout.replicated:
        _check_replicated(found)
    return plane


def _check_replicated(found: Bytes) -> None:
    """Raise if the rows of a tile have different scales: then it is not a plane of a format with square tiles."""
    rows = found.format.block_rows
    whole = found.scales.shape[0] // rows * rows
    tiles = found.scales[:whole].reshape(-1, rows, found.scales.shape[1])
    if not torch.equal(tiles, tiles[:, :1].expand_as(tiles)):
        raise ValueError(
            f"the model wants {found.format.name}, with one scale for {rows} rows, but the rows of the stored weight "
            "have scales of their own. Convert the model with a recipe without 2-D scales, such as nvfp4 instead of "
            "nvfp4(2d) in fprop"
        )


def is_nvfp4(fmt: Format) -> bool:
    """Whether a format is of the NVFP4 family."""
    return kind_of(fmt) == NVFP4
