"""How two operands are multiplied on a GPU: natively, or decoded, and why. GEMMs do what `route` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from ...formats import Format
from ...planes import ROWWISE, Plane, empty_plane
from ...runtime.settings import settings
from ..exactness import exact_in_bf16
from ..operands import GEMMS
from .gpu import Gpu
from .rules import refuses

Operands = Literal["codes", "bf16", "fp32"]


class Route(NamedTuple):
    """How a GEMM multiplies its operands.

    Attributes:
        operands: what is multiplied: "codes" by a native GEMM, or decoded numbers in "bf16" or "fp32".
        reason: why it is not native; None if it is.
    """

    operands: Operands
    reason: str | None

    @property
    def is_native(self) -> bool:
        """Whether codes are multiplied, without decoding."""
        return self.operands == "codes"

    def __str__(self) -> str:
        return "native" if self.is_native else f"decoded to {self.operands}: {self.reason}"


def route(a: Plane, b: Plane, gpu: Gpu | None) -> Route:
    """How two operands are multiplied under the current settings.

    Args:
        a: the first operand, [rows, summed dimension].
        b: the second operand, [columns, summed dimension].
        gpu: the GPU that multiplies; None for another device.
    """
    forced = settings.native_gemms is False
    reason = "settings.native_gemms is False" if forced else refuses(a, b, gpu)
    if reason is None:
        return Route("codes", None)
    return Route("bf16" if _multiplied_in_bf16(a, b, gpu) else "fp32", reason)


def explain(
    formats: Mapping[str, Format | tuple[Format, Format]], tokens: int, inputs: int, outputs: int, gpu: Gpu
) -> dict[str, Route]:
    """How the three GEMMs of a linear layer would be multiplied on a GPU, which does not have to be there.

        explain({"input": mxfp8, "weight": mxfp8, "grad_output": nvfp4}, 8192, 4096, 4096, Gpu((10, 0)))

    Args:
        formats: the formats of "input", "weight" and "grad_output": one for both directions, or (rowwise, columnwise).
        tokens: number of rows of the input.
        inputs: number of input features.
        outputs: number of output features.
        gpu: the GPU.

    Returns:
        The route of "fprop", "dgrad" and "wgrad".
    """
    shapes = {"input": (tokens, inputs), "weight": (outputs, inputs), "grad_output": (tokens, outputs)}
    routes = {}
    for which, reads in GEMMS.items():
        planes = []
        for tensor, direction in reads.items():
            given = formats[tensor]
            fmt = given if isinstance(given, Format) else given[direction is not ROWWISE]
            planes.append(
                empty_plane(fmt, direction, shapes[tensor], device=torch.device("meta"), dtype=torch.bfloat16)
            )
        routes[which] = route(planes[0], planes[1], gpu)
    return routes


def _multiplied_in_bf16(a: Plane, b: Plane, gpu: Gpu | None) -> bool:
    """Whether decoded operands are multiplied in bf16: it holds them exactly, and the GPU has bf16 tensor cores.

    MXFP8 is multiplied in bf16 although it rounds numbers below 2**-126, unless fp32 operands are asked for.
    """
    if settings.gemm_operand_dtype == torch.float32 or a.format.rotation != b.format.rotation:
        return False
    if gpu is None or gpu.capability < (8, 0):
        return False
    return _fits_bf16(a) and _fits_bf16(b)


def _fits_bf16(plane: Plane) -> bool:
    if plane.format.is_identity:
        return plane.data.dtype == torch.bfloat16
    return exact_in_bf16(plane.format, subnormals=False)
