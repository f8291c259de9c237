"""What a recipe means for a linear layer, written by hand from the documentation; and the numbers of its three GEMMs.

Operands are encoded and decoded by the transcription and multiplied in float64. The library multiplies the same decoded
numbers in fp32, in an order of its own, so its results may differ by the bound that `check_product` derives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossgrain import recipe as recipes

from . import transcription as tr
from .tensor_model import rounded
from .transcription import Array

BLOCK = 32  # what sizes are padded to: a multiple of all blocks that are not ragged


class LayerFormats(NamedTuple):
    """The formats of x, W and dy of a layer, each rowwise and columnwise.

    Attributes:
        x: rowwise for fprop, columnwise for wgrad.
        w: rowwise for fprop, columnwise for dgrad.
        dy: rowwise for dgrad, columnwise for wgrad.
        derived: the tensors whose columnwise plane is made from the decoded rowwise plane.
    """

    x: tuple[str, str]
    w: tuple[str, str]
    dy: tuple[str, str]
    derived: str = ""

    @property
    def plain(self) -> bool:
        return {*self.x, *self.w, *self.dy} == {"identity"}


def everywhere(x: str, w: str = "", dy: str = "") -> LayerFormats:
    """One format in both directions of each tensor."""
    return LayerFormats((x, x), (w or x, w or x), (dy or x, dy or x))


HP = everywhere("identity")
MXFP8 = everywhere("mxfp8")
FP8 = everywhere("fp8", dy="fp8_e5m2")
NVFP4 = everywhere("nvfp4")
BOTH = "x w"

# One for all layers, or one for each of the layers l0, l1 and l2.
RECIPES: dict[str, tuple[LayerFormats, ...]] = {
    "hp": (HP,),
    "mxfp8": (MXFP8,),
    "MXFP8BlockScaling()": (MXFP8,),
    "mxfp8-2d": (everywhere("mxfp8", w="mxfp8_2d"),),
    "fp8": (FP8,),
    "Float8CurrentScaling()": (FP8,),
    "fp8-block": (everywhere("fp8_block", w="fp8_block_2d"),),
    "all: mxfp4": (everywhere("mxfp4"),),
    "nvfp4-plain": (NVFP4,),
    "all: nvfp4(2d)": (everywhere("nvfp4", w="nvfp4_2d"),),
    "hp-fwd-mxfp8-bwd": (LayerFormats(("identity", "mxfp8"), ("identity", "mxfp8"), ("mxfp8", "mxfp8")),),
    "mxfp8-fwd-hp-bwd": (LayerFormats(("mxfp8", "identity"), ("mxfp8", "identity"), ("identity", "identity"), BOTH),),
    "nvfp4-fwd-mxfp8-bwd": (LayerFormats(("nvfp4_row_scaled", "mxfp8"), ("nvfp4", "mxfp8"), ("mxfp8", "mxfp8"), BOTH),),
    "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4": (
        LayerFormats(("mxfp8", "nvfp4"), ("mxfp8", "nvfp4"), ("nvfp4", "nvfp4")),
    ),
    "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4, weight.source: dequantized": (
        LayerFormats(("mxfp8", "nvfp4"), ("mxfp8", "nvfp4"), ("nvfp4", "nvfp4"), "w"),
    ),
    "fprop: fp8, dgrad: mxfp8, wgrad: hp": (
        LayerFormats(("fp8", "identity"), ("fp8", "mxfp8"), ("mxfp8", "identity")),
    ),
    "mxfp8; l1: hp": (MXFP8, HP, MXFP8),
    "nvfp4-plain; l0|l2: wgrad: mxfp8": (
        LayerFormats(("nvfp4", "mxfp8"), ("nvfp4", "nvfp4"), ("nvfp4", "mxfp8")),
        NVFP4,
        LayerFormats(("nvfp4", "mxfp8"), ("nvfp4", "nvfp4"), ("nvfp4", "mxfp8")),
    ),
    "mxfp8, backward_override: high_precision": (
        LayerFormats(("mxfp8", "identity"), ("mxfp8", "identity"), ("identity", "identity")),
    ),
    "nvfp4-plain, backward_override: dequantized": (
        LayerFormats(("nvfp4", "identity"), ("nvfp4", "identity"), ("identity", "identity"), BOTH),
    ),
}
# With these, weights that are kept quantized do not have the planes that LayerFormats says.
OVERRIDING = [name for name in RECIPES if "backward_override" in name]


def recipe_of(name: str) -> Any:
    """What a user writes for a recipe of the table."""
    return getattr(recipes, name[:-2])() if name.endswith("()") else name


def formats_of(name: str, layer: int) -> LayerFormats:
    formats = RECIPES[name]
    return formats[layer if len(formats) > 1 else 0]


# ---- operands ------------------------------------------------------------------------------------------------


def padded(x: Array) -> Array:
    """With zeros up to whole blocks, which change neither an amax nor a sum."""
    return np.pad(x, [(0, -size % BLOCK) for size in x.shape])


def operand(x: Tensor, formats: tuple[str, str], derives: bool, columnwise: bool, marks: bool) -> Array:
    """The numbers [M, K] that a GEMM reads of a tensor, one of its directions, in float32.

    Args:
        x: the tensor.
        formats: the formats of both directions.
        derives: whether columns are made from decoded rows.
        columnwise: which direction.
        marks: NaNs and infinities that the format would lose are marked with NaN.
    """
    numbers, infinite = padded(x.detach().float().numpy()), torch.finfo(x.dtype).max
    if columnwise and derives:
        numbers = rounded(_coded(numbers, formats[0], infinite, marks), x.dtype)
    if columnwise:
        return _coded(numbers.T, formats[1], infinite, marks).T
    return _coded(numbers, formats[0], infinite, marks)


def _coded(numbers: Array, name: str, infinite: float, marks: bool) -> Array:
    fmt = tr.FORMATS[name]
    if not fmt.element:
        return numbers
    decoded = tr.decode(tr.encode(numbers, fmt, infinite=infinite), fmt)
    lost = np.isfinite(decoded) & ~np.isfinite(numbers)
    if not marks or not lost.any():
        return decoded
    if fmt.element == "e2m1":  # it has no NaN, so that the scale of the block is marked
        assert fmt.block is not None
        lost = tr.spread(tr.block_amax(lost.astype(np.float32), fmt.block) > 0, fmt.block, lost.shape)
    return np.where(lost, np.float32(np.nan), decoded)


# ---- products ------------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore", over="ignore")
def check_product(what: str, found: Tensor, a: Array, b: Array, added: Array | None = None) -> None:
    """Compare ``found`` with a · b + added, computed in float64.

    The bound: a product of two decoded numbers is one rounding, 2^-24 of it, and so is each of the K additions of
    partial sums, which are at most Σ|a||b|; both operands were decoded with up to three roundings; and the scales of
    tensors and rows are applied to the sum. So (K + 10) * 2^-24 * Σ|a||b|, and to be independent of the second order
    terms twice that. Then the result is rounded to its dtype, perhaps before and after something is added.
    """
    rows, columns = found.shape
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    product = (a64 @ b64)[:rows, :columns]
    size = (np.abs(a64) @ np.abs(b64))[:rows, :columns]
    wanted = product if added is None else product + added.astype(np.float64)
    precision = torch.finfo(found.dtype)
    bound = (a.shape[1] + 10) * 2.0**-23 * size + precision.eps * (np.abs(product) + np.abs(wanted)) + precision.tiny
    actual = found.detach().double().numpy()
    odd = ~np.isfinite(wanted)
    assert not np.isfinite(actual[odd]).any(), f"{what}: has numbers where NaNs or infinities have to be"
    unknown = odd | (size > precision.max / 4)  # which of the partial sums overflow depends on their order
    difference = np.where(unknown, 0.0, np.abs(actual - wanted) - bound)
    wrong = ~(difference <= 0)
    if wrong.any():
        row, column = (int(place) for place in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: is not the product of the operands in {int(wrong.sum())} of {wrong.size} places, first in "
            f"[{row}, {column}]: {actual[row, column]} instead of {wanted[row, column]} ± {bound[row, column]}"
        )
