"""The end of GEMMs with kernels: scales, bias, what was there before, and the layout of scales that GEMMs read."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...planes import round_up
from ..global_scale import GlobalScale
from .arguments import FAR
from .device.epilogue import epilogue_kernel, joint_scale_kernel
from .device.swizzle import swizzle_kernel
from .launch import Launcher
from .shapes import EPILOGUE_TILE, SWIZZLED_TILES


def joint_scale(
    launcher: Launcher, row: GlobalScale | None, column: GlobalScale | None, alpha: float, like: Tensor
) -> Tensor:
    """See `reference.epilogue.joint_scale`."""
    out = torch.empty(2, dtype=torch.float32, device=like.device)
    if not isinstance(like, FakeTensor):
        launcher(
            joint_scale_kernel,
            1,
            like.device,
            1,
            {**_scale("row", row), **_scale("column", column), "alpha": _double_bits(alpha), "out": out},
        )
    return out


def finish(
    launcher: Launcher,
    compiled: bool,
    product: Tensor,
    out: Tensor,
    row: GlobalScale | None,
    column: GlobalScale | None,
    alpha: float,
    bias: Tensor | None,
    beta: float | None,
) -> None:
    """See `reference.epilogue.epilogue`."""
    if isinstance(product, FakeTensor) or not product.numel():
        return
    rows, columns = product.shape
    tile = EPILOGUE_TILE
    strides = [*product.stride(), *out.stride()]
    launcher(
        epilogue_kernel,
        -(-rows // tile.rows) * -(-columns // tile.columns),
        product.device,
        tile.warps,
        {
            "product": product,
            "product_m": product.stride(0),
            "product_n": product.stride(1),
            "out": out,
            "out_m": out.stride(0),
            "out_n": out.stride(1),
            "M": rows,
            "N": columns,
            **_scale("row", row),
            **_scale("column", column),
            "alpha": _double_bits(alpha),
            "beta": _single_bits(0.0 if beta is None else beta),
            "bias": None if bias is None else bias.contiguous(),
            "SCALED": row is not None or column is not None or alpha != 1.0,
            "ADDS": beta is not None,
            "BIAS": bias is not None,
            "COMPILED": compiled,
            "BM": tile.rows,
            "BN": tile.columns,
            "WIDE": max(rows, columns) * max(strides) >= FAR,
        },
    )


def swizzled(launcher: Launcher, scales: Tensor) -> Tensor:
    """See `layout.swizzle_scales`."""
    rows, blocks = scales.shape
    out = torch.empty(round_up(rows, 128), round_up(blocks, 4), dtype=scales.dtype, device=scales.device)
    if out.numel() and not isinstance(scales, FakeTensor):
        programs = out.shape[0] // 128 * -(-out.shape[1] // (4 * SWIZZLED_TILES))
        arguments = {
            "scales": scales,
            "scale_r": scales.stride(0),
            "scale_c": scales.stride(1),
            "out": out,
            "R": rows,
            "C": blocks,
            "TILES": SWIZZLED_TILES,
        }
        launcher(swizzle_kernel, programs, scales.device, 4, arguments)
    return out


def _scale(name: str, scale: GlobalScale | None) -> dict[str, Any]:
    kind = "none" if scale is None else "single" if scale.is_single else "each"
    return {
        name: None if scale is None else scale.values.contiguous(),
        f"{name}_factor": 0 if scale is None else _double_bits(scale.factor),
        name.upper(): kind,
    }


def _double_bits(number: float) -> int:
    """The bits of a float64 number, as a signed integer."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


def _single_bits(number: float) -> int:
    """The bits of the nearest fp32 number, as a signed integer."""
    (bits,) = struct.unpack("<i", torch.tensor(number, dtype=torch.float32, device="cpu").numpy().tobytes())
    return int(bits)
