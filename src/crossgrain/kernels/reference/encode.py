"""Encode planes, one at a time: the executable specification of their bytes.

In both directions a kernel gets an operand [R, C] whose blocks are along the last dimension. The steps are always the
same: rotate if the format does, compute scales, multiply, round, store.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import Format
from ...planes import ROWWISE, Plane
from ..target import GroupedTarget, Target
from .blocks import amax, block_amax, row_amax, spread
from .elements import FP32_MAX, round_stochastically, round_to_nearest
from .four_over_six import encode_four_over_six
from .hadamard import rotate
from .packing import pack
from .random_bits import random_bytes
from .scaling import (
    Scales,
    e8m0_floor_scales,
    e8m0_up_scales,
    fp32_scales,
    global_scale,
    quotient,
    two_level_scales,
)
from .strips import target_strips


def measure(x: Tensor, target: Target) -> Tensor | None:
    """The amax that is needed for encoding, and may be reduced over ranks first; None if none is needed.

    It is fp32 [1], or has one number per row of the operand. If the format rotates, it is that of the rotated numbers.
    """
    fmt = target.plane.format
    if fmt.global_amax == "row":
        return torch.cat([row_amax(operand_of(rows, part.plane)) for rows, part in target_strips(x, target)])
    if fmt.global_amax == "tensor" and fmt.rotation is not None:
        found = [amax(operand_of(rows, part.plane)) for rows, part in target_strips(x, target)]
        return torch.cat(found).amax().view(1)
    if fmt.global_amax == "tensor" or (fmt.block is None and not fmt.is_identity):
        return amax(x)
    return None


def encode(x: Tensor, target: Target, seed: int | None) -> None:
    """Write ``x`` to the buffers of ``target.plane``."""
    plane, fmt = target.plane, target.encoding.format
    if fmt.is_identity:
        plane.data.copy_(x.reshape(plane.data.shape))
        return
    if x.numel() == 0:
        _write_scalars(target)
        return
    assert fmt.element is not None
    for rows, part in target_strips(x, target):
        codes, stored = encoded(rows, part, seed)
        part.plane.operand_codes().copy_(pack(codes, fmt.element.bits))
        write_scales(stored, part)


def encoded(x: Tensor, target: Target, seed: int | None, block_max: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes [R, C], one per byte, and stored scales, one per block. ``block_max`` are amaxes of blocks, if known."""
    plane, encoding = target.plane, target.encoding
    fmt = encoding.format
    operand = operand_of(x, plane)
    if encoding.four_over_six is not None:
        assert target.amax is not None
        return encode_four_over_six(operand, encoding, target.amax.view(-1, 1))
    if block_max is None and fmt.block is not None:
        block_max = block_amax(operand, fmt.block)
    stored, factor = _scales(block_max, target, overflow=_overflow_scale(x, fmt))
    block = fmt.block or (operand.shape[0], operand.shape[1])
    scaled = operand * spread(factor, block, plane.operand_shape)
    return _round(scaled, target, seed), stored


def write_scales(stored: Tensor, target: Target) -> None:
    """Write one scale per block, and the global amax, to the plane."""
    plane, fmt = target.plane, target.encoding.format
    if fmt.layout.replicated:
        stored = stored.repeat_interleave(fmt.block_rows, dim=0)
    plane.operand_scales().copy_(stored)
    if plane.amax is not None and target.amax is not None:
        plane.amax.copy_(target.amax)


def operand_of(x: Tensor, plane: Plane) -> Tensor:
    """``x`` as the fp32 operand [R, C] of ``plane``. If the format rotates, it is rotated and rounded to bf16."""
    operand = x.reshape(plane.shape).to(torch.float32)
    if plane.direction is not ROWWISE:
        operand = operand.t()
    if plane.format.rotation is not None:
        operand = rotate(operand, plane.format.rotation).to(torch.bfloat16).to(torch.float32)
    return operand.contiguous()


def _scales(block_max: Tensor | None, target: Target, overflow: float) -> Scales:
    encoding, fmt = target.encoding, target.encoding.format
    assert fmt.element is not None
    if block_max is None:
        return tensor_scale(target)
    if fmt.scale_rule == "fp32":
        return fp32_scales(
            block_max,
            fmt.element,
            target=fmt.target,
            epsilon=encoding.epsilon,
            power_of_two=encoding.power_of_two,
            overflow=overflow,
        )
    if fmt.scale_rule == "e8m0_up":
        return e8m0_up_scales(block_max, fmt.element)
    if fmt.scale_rule == "e8m0_floor":
        return e8m0_floor_scales(block_max, fmt.element)
    assert fmt.scale_rule == "two_level" and target.amax is not None
    return two_level_scales(block_max, global_scale(target.amax.view(-1, 1), fmt), fmt)


def tensor_scale(target: Target | GroupedTarget) -> Scales:
    """The scale of a per-tensor format (of each group): the given one (delayed scaling), or from the measured amax."""
    encoding, fmt = target.encoding, target.encoding.format
    assert fmt.element is not None
    if target.scale is not None:
        factor = target.scale.view(-1, 1)
        return Scales(quotient(1.0, factor), factor)
    assert target.amax is not None
    return fp32_scales(
        target.amax.view(-1, 1),
        fmt.element,
        target=fmt.target,
        epsilon=encoding.epsilon,
        power_of_two=encoding.power_of_two,
    )


def _overflow_scale(x: Tensor, fmt: Format) -> float:
    """The scale to use if it is beyond fp32. Scales of blocks stay in the range of the input's dtype."""
    return FP32_MAX if fmt.block is None else torch.finfo(x.dtype).max


def _round(scaled: Tensor, target: Target, seed: int | None) -> Tensor:
    encoding, plane, element = target.encoding, target.plane, target.encoding.format.element
    assert element is not None
    if not encoding.stochastic:
        return round_to_nearest(scaled, element)
    assert seed is not None
    where = (plane.direction, plane.operand_shape, scaled.device)
    randomness = random_bytes(seed, *where, encoding.random, target.within)
    return round_stochastically(scaled, element, randomness)


def _write_scalars(target: Target) -> None:
    """Write the per-tensor scale and the amax of an empty tensor, which has no codes and blocks."""
    plane = target.plane
    if plane.format.block is None and plane.scale is not None:
        plane.operand_scales().copy_(tensor_scale(target).stored)
    if plane.amax is not None and target.amax is not None:
        plane.amax.copy_(target.amax)
