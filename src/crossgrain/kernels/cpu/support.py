"""Properties of targets by which kernels are chosen, and arguments of kernels."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from ctypes import c_float
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats import Element, Format
from ...formats.dtypes import HIGH_PRECISION
from ...planes import COLUMNWISE, ROWWISE, Direction, Plane
from ...runtime.transforms import current_transform, dispatch_modes, memory_is_out_of_reach
from ..reference.elements import FP32_MAX
from ..reference.encode import tensor_scale
from ..reference.random_bits import stream_keys
from ..reference.scaling import global_scale, quotient
from ..target import Target
from . import scalars
from .elements import element_tag
from .known import E2M1, E4M3, E5M2, is_known
from .places import Numbers, groups_of, numbers_of_groups, numbers_of_rows
from .tags import BF16, F32, NO, YES, Tag

Seed = int | Sequence[int] | None  # one seed, one for each group, or None without stochastic rounding

_MOST_COUNTED = 1 << 33  # kernels count random words, of which each is for four numbers, in 32 bits


def from_bits(bits: int) -> Tensor:
    return torch.full((1,), bits, dtype=torch.int32, device="cpu").view(torch.float32)


def reciprocal(factor: float) -> float:
    return scalars.quotient(1.0, factor)


tag = lru_cache(maxsize=256)(Tag)
"""A `Tag` by its name, from a cache."""


def yes_or_no(condition: bool) -> Tag:
    return YES if condition else NO


def numbers(*values: float) -> Numbers:
    return Numbers(array("f", values))


def global_scales(target: Target) -> tuple[Numbers, Numbers]:
    """The scales of the whole tensor (or of each row) for kernels: to encode, and to decode.

    In a two-level format, the first is divided by the largest number of the element, except with 4-over-6, which does
    it later. In a per-tensor format only the first is used, in others none.
    """
    fmt = target.encoding.format
    if fmt.block is not None and fmt.scale_rule != "two_level":
        return ONE, ONE
    groups = getattr(target, "groups", None)
    if fmt.block is None:
        if groups is not None:
            return numbers_of_groups(tensor_factors(target), groups), ONE
        return numbers(tensor_factor(target)), ONE
    assert target.amax is not None
    if groups is not None:
        encode_each, decode_each = two_level_scales(target)
        return numbers_of_groups(encode_each, groups), numbers_of_groups(decode_each, groups)
    if target.amax.numel() == 1:
        encode, decode, _ = _two_level_numbers(target)
        return Numbers(array("f", (encode,))), Numbers(array("f", (decode,)))
    encode_scales, decode_scales = two_level_scales(target)
    return Numbers(encode_scales.contiguous()), Numbers(decode_scales.contiguous())


def global_factors(amax: float, fmt: Format) -> tuple[float, float]:
    """The encode and the decode half of a two-level format's global scale."""
    assert fmt.element is not None
    if amax == 0.0:
        return 1.0, 1.0
    encode = c_float(fmt.element.max * fmt.scale_bound / amax).value
    encode = min(encode, FP32_MAX) if encode == encode else encode
    if encode == 0.0:
        encode = 1.0
    return encode, c_float(1.0 / encode).value


def _two_level_numbers(target: Target) -> tuple[float, float, float]:
    """The global scales for one amax, and that amax, as Python numbers."""
    assert target.amax is not None
    amax = target.amax.item()
    encode, decode = global_factors(amax, target.encoding.format)
    return encode if target.encoding.four_over_six is not None else c_float(encode * SIXTH).value, decode, amax


def two_level_scales(target: Target) -> tuple[Tensor, Tensor]:
    """The global scales of a two-level format, for each amax."""
    assert target.amax is not None
    scale = global_scale(target.amax, target.encoding.format)
    return scale.encode if target.encoding.four_over_six is not None else scale.encode * SIXTH, scale.decode


def scales_of_each_row(target: Target) -> list[Numbers]:
    """The global scales and the amax of each row of the operand."""
    groups = getattr(target, "groups", None)
    assert target.amax is not None
    if groups is not None:
        return [numbers_of_rows(values, groups) for values in (*two_level_scales(target), target.amax)]
    if target.amax.numel() == 1:
        rows = target.plane.shape[0 if target.plane.direction is ROWWISE else 1]
        return [Numbers(array("f", (number,)) * rows) for number in _two_level_numbers(target)]
    amax = Numbers(target.amax.contiguous())
    return [scale.for_each_of(target.plane.operand_shape[0]) for scale in (*global_scales(target), amax)]


ONE = numbers(1.0)


class _Scratch(threading.local):
    memory: Tensor | None = None


_scratch = _Scratch()


def scratch(size: int) -> Tensor:
    """Memory of this thread, at least ``size`` bytes. It is reused, because allocating takes time.

    Hold it while its address is in use: a call that needs more, as in a signal's handler, replaces it.
    """
    memory = _scratch.memory
    if memory is None or memory.numel() < size:
        with torch.inference_mode(False):
            memory = _scratch.memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    return memory


def tensor_factor(target: Target) -> float:
    """The scale by which a per-tensor format multiplies: the given one, or from the measured amax."""
    if target.scale is not None:
        return float(target.scale.item())
    assert target.amax is not None
    return scalars.tensor_factor(target.amax.item(), target.encoding)


def tensor_factors(target: Target) -> Tensor:
    """`tensor_factor` of each group."""
    return tensor_scale(target).factor.view(-1)


def factor_for_kernels(target: Target) -> Any:
    """`tensor_factor` as a number, or as an array with one for each group."""
    return tensor_factor(target) if groups_of(target) is None else tensor_factors(target).numpy()


def write_tensor_scale(target: Target) -> None:
    """Write the stored scale of a per-tensor plane."""
    groups = groups_of(target)
    if groups is None:
        scales_of(target.plane).fill_(reciprocal(tensor_factor(target)))
    else:
        groups.scale.copy_(quotient(1.0, tensor_factors(target)))


SIXTH = scalars.fp32(1.0 / E2M1.max)


Stream = tuple[Any, Any, int, int]

NO_STREAM: Stream = (0, 0, 0, 0)


def keys_of(seed: Seed, target: Target) -> tuple[Any, Any]:
    """The two keys of stochastic rounding for a plane; arrays for the seeds of groups."""
    assert seed is not None
    direction = target.plane.direction
    if isinstance(seed, int):
        return stream_keys(seed, direction)
    first, second = zip(*(stream_keys(each, direction) for each in seed), strict=True)
    return np.array(first), np.array(second)


def has_memory(tensor: Tensor) -> bool:
    """Whether the address of a tensor has its numbers. Traced, transformed and lazy tensors do not have them there."""
    return (
        type(tensor) is Tensor
        and not (dispatch_modes() and memory_is_out_of_reach())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
    )


def is_plain_memory(x: Tensor) -> bool:
    """Whether kernels can read ``x`` as it is, and new tensors are ordinary ones: nothing is traced or transformed."""
    return (
        type(x) is Tensor
        and x.is_contiguous()
        and not dispatch_modes()
        and current_transform() is None
        and not torch._is_functional_tensor(x)
        and not x.is_neg()
        and x.data_ptr() != 0
    )


def all_have_memory(tensors: list[Tensor]) -> bool:
    """Whether all tensors have memory. If nothing is traced or transformed, only their addresses must be checked."""
    if dispatch_modes() or current_transform() is not None:
        return all(map(has_memory, tensors))
    for tensor in tensors:  # noqa: SIM110 - a generator is a call of Python for each tensor, in every GEMM
        if type(tensor) is not Tensor or tensor.data_ptr() == 0:
            return False
    return True


def plane_has_memory(plane: Plane) -> bool:
    """Whether all buffers of a plane have memory. It is asked for both operands of every GEMM, so it calls little."""
    data, scale, amax = plane.data, plane.scale, plane.amax
    if (
        dispatch_modes()
        or current_transform() is not None
        or type(data) is not Tensor
        or data.data_ptr() == 0
        or (scale is not None and (type(scale) is not Tensor or scale.data_ptr() == 0))
        or (amax is not None and (type(amax) is not Tensor or amax.data_ptr() == 0))
    ):
        return all_have_memory(plane.buffers())
    return True


def is_readable(x: Tensor) -> bool:
    return x.dtype in HIGH_PRECISION and has_memory(x)


def readable_memory(x: Tensor) -> Tensor:
    """``x`` as memory that kernels can read; a copy only if necessary."""
    if x.dtype != torch.float16 and x.is_contiguous():
        return x
    x = x.detach()
    return (x.to(torch.float32) if x.dtype == torch.float16 else x).contiguous()


def tag_of_dtype(dtype: torch.dtype) -> Tag:
    return BF16 if dtype == torch.bfloat16 else F32


def tag_of_input(x: Tensor) -> Tag:
    return tag_of_dtype(x.dtype)


def tag_of_plane(plane: Plane) -> Tag:
    return tag_of_element(plane.format.element)


def tag_of_element(element: object) -> Tag:
    found = _element_tags.get(id(element))
    if found is None:
        assert isinstance(element, Element)  # tables are not known to kernels
        found = _element_tags[id(element)] = element, element_tag(element)
    return found[1]


_element_tags: dict[int, tuple[Element, Tag]] = {}  # by address; the elements are kept, so that addresses stay theirs


def scales_of(plane: Plane) -> Tensor:
    assert plane.scale is not None
    return plane.scale


def is_row_run(target: Target) -> bool:
    return target.plane.direction is ROWWISE and _is_run(target)


def goes_along(row: Target, column: Target) -> bool:
    """Whether a rowwise plane can be written in the same pass as a columnwise plane.

    These are the pairs that are used in training. Other planes are written one after the other.
    """
    eight_bits = row.plane.format.element in (E4M3, E5M2) and not row.encoding.stochastic
    nvfp4 = row.plane.format.scale_rule == "two_level" and row.plane.format.global_amax == "tensor"
    usual = column.encoding.four_over_six is None and column.plane.format.global_amax != "row"
    return usual and (((eight_bits or nvfp4) and is_row_run(row)) or is_row_cast(row))


def is_column_run(target: Target) -> bool:
    return target.plane.transposed and _is_run(target)


def _is_run(target: Target) -> bool:
    """Whether blocks are along the rows of the operand, with the scales of MX formats or of NVFP4."""
    fmt = target.encoding.format
    mx = fmt.scale_rule in ("e8m0_up", "e8m0_floor") and fmt.block == (1, 32)
    nvfp4 = fmt.scale_rule == "two_level" and fmt.block == (1, 16)
    plain = fmt.rotation is None and target.encoding.four_over_six is None
    return (mx or nvfp4) and plain and _is_plain(target)


def _is_plain(target: Target) -> bool:
    """Whether codes and scales are stored row by row, and kernels can count their random words."""
    plane = target.plane
    return plane.data.is_contiguous() and scales_of(plane).stride(1) == 1 and _is_countable(target)


def _is_countable(target: Target) -> bool:
    """Whether random words begin with the first number of a block, and are few enough to count in 32 bits."""
    if not target.encoding.stochastic:
        return True
    rows, columns = target.plane.shape
    if target.within is None:
        return rows * columns < _MOST_COUNTED
    top, left, width = target.within
    first = left if target.plane.direction is ROWWISE else top
    return first % 4 == 0 and (top + rows) * width < _MOST_COUNTED


def is_mxfp8(target: Target, block: tuple[int, int]) -> bool:
    fmt = target.encoding.format
    return (
        fmt.scale_rule == "e8m0_up"
        and fmt.block == block
        and fmt.element in (E4M3, E5M2)
        and not target.encoding.stochastic
        and not target.plane.transposed
        and _is_plain(target)
        and target.plane.shape[1] % 32 == 0
    )


def is_mxfp8_columns(target: Target) -> bool:
    return target.plane.direction is COLUMNWISE and is_mxfp8(target, (1, 32))


def is_mxfp8_tiled(target: Target) -> bool:
    return is_mxfp8(target, (32, 32))


def is_cast(target: Target) -> bool:
    fmt, plane = target.encoding.format, target.plane
    return (
        fmt.block is None
        and fmt.element in (E4M3, E5M2)
        and not target.encoding.stochastic
        and not plane.transposed
        and plane.data.is_contiguous()
    )


def is_nvfp4_tile_rows(target: Target) -> bool:
    fmt = target.encoding.format
    two_level = fmt.scale_rule == "two_level" and fmt.block == (16, 16)
    return target.plane.direction is ROWWISE and two_level and _is_plain(target)


def is_nvfp4_tiled_pair(row: Target, column: Target) -> bool:
    """Whether a columnwise target has the codes of a rowwise one with 16x16 tiles.

    Not with stochastic rounding, which draws for each plane, nor with 4-over-6: errors of a tile are added up along
    the blocks of the plane, and rounded on the way.
    """
    encoding = row.encoding
    return (
        column.encoding == encoding
        and not encoding.stochastic
        and encoding.four_over_six is None
        and is_nvfp4_columns(column)
        and same_amax(row.amax, column.amax)
    )


def is_four_over_six_rows(target: Target) -> bool:
    one_row = target.encoding.format.block_rows == 1
    four_over_six = target.encoding.four_over_six is not None
    return target.plane.direction is ROWWISE and one_row and four_over_six and _is_plain(target)


def is_nvfp4_columns(target: Target) -> bool:
    """Whether a target is a columnwise NVFP4 plane, also with rotation, tiles or 4-over-6."""
    fmt, plane = target.encoding.format, target.plane
    two_level = fmt.scale_rule == "two_level" and fmt.block in ((1, 16), (16, 16))
    return plane.transposed and two_level and _is_plain(target) and plane.shape[1] >= 32


def is_fp8_tiled(target: Target, beside: Target | None = None) -> bool:
    """Whether a target is FP8 in blocks of 128, or transposed per-tensor FP8.

    With ``beside``: whether it can be written in the same pass as that target.
    """
    fmt, plane = target.encoding.format, target.plane
    suits = (
        fmt.scale_rule == "fp32"
        and fmt.element in (E4M3, E5M2)
        and fmt.block in (None, (1, 128), (128, 128))
        and not target.encoding.stochastic
        and (plane.direction is ROWWISE or plane.transposed)
        and plane.data.is_contiguous()
        and (fmt.block is None or scales_of(plane).stride(1) == 1)
    )
    if beside is None:
        return suits and (fmt.block is not None or plane.direction is COLUMNWISE)
    same_scale = target.scale is beside.scale and (fmt.block is not None or same_amax(target.amax, beside.amax))
    return suits and target.encoding == beside.encoding and same_scale


def same_amax(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def row_bytes(scales: Tensor) -> int:
    return scales.stride(0) * scales.element_size() if scales.dim() else 0


def is_row_cast(target: Target) -> bool:
    return target.plane.direction is ROWWISE and is_cast(target)


def is_standard(plane: Plane) -> bool:
    """Whether a plane is in a format that kernels know, in the layout of that format."""
    if plane.amax is not None and not plane.amax.is_contiguous():
        return False
    return is_standard_format(plane.format, plane.direction, plane.transposed)


@lru_cache(maxsize=1024)
def is_standard_format(fmt: Format, direction: Direction, transposed: bool) -> bool:
    return is_known(fmt) and (fmt.block is None or transposed == (fmt.transposes and direction is COLUMNWISE))
