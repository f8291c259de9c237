"""Operands of the three GEMMs in every family of formats, and the GPUs that multiply them natively."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from crossgrain.gemm.native import Gpu, machine
from crossgrain.gemm.native.scaled_call import run
from crossgrain.gemm.operands import GEMMS
from crossgrain.planes import Plane

from ...common.quantizers import QUANTIZERS
from .twin import Twin

H100, B200 = Gpu((9, 0)), Gpu((10, 0))
FAMILIES = {  # quantizers of input, weight and grad_output, and the GPU
    "fp8": (("fp8", "fp8", "fp8_e5m2"), H100),
    "fp8_delayed": (("fp8_delayed", "fp8_delayed", "fp8_delayed"), Gpu((8, 9))),
    "fp8_on_b200": (("fp8", "fp8", "fp8"), B200),
    "fp8_block": (("fp8_block", "fp8_block_2d", "fp8_block"), H100),
    "mxfp8": (("mxfp8", "mxfp8", "mxfp8"), B200),
    "mxfp8_2d": (("mxfp8", "mxfp8_2d", "mxfp8"), B200),
    "mxfp8_e5m2": (("mxfp8", "mxfp8", "mxfp8_e5m2"), B200),
    "nvfp4": (("nvfp4", "nvfp4_2d", "nvfp4"), B200),
    "nvfp4_rotated": (("nvfp4_rht", "nvfp4_2d", "nvfp4_rht"), Gpu((12, 0))),
    "nvfp4_4over6": (("nvfp4_4over6_mse", "nvfp4_2d_max256", "nvfp4"), B200),
}
SIZES = {  # tokens, inputs, outputs: multiples that are odd wherever the rules allow it
    "fp8_block": (132, 384, 256),
}
ODD = (96, 160, 224)  # not multiples of the 128 rows or the 4 blocks of a tile of scales


def sizes_of(family: str, which: str) -> tuple[int, int, int]:
    """Tokens, inputs and outputs. Weight gradients sum over the tokens."""
    tokens, inputs, outputs = SIZES.get(family, ODD)
    return (256 if family == "fp8_block" and which == "wgrad" else tokens), inputs, outputs


def shapes_of(tokens: int, inputs: int, outputs: int) -> dict[str, tuple[int, int]]:
    return {"input": (tokens, inputs), "weight": (outputs, inputs), "grad_output": (tokens, outputs)}


def planes_of(which: str, family: str, numbers: dict[str, Tensor] | None = None) -> tuple[Plane, Plane]:
    """The two operands of a GEMM, of random numbers or of those that are given."""
    names = dict(zip(("input", "weight", "grad_output"), FAMILIES[family][0], strict=True))
    shapes = shapes_of(*sizes_of(family, which))
    planes = []
    for at, (tensor, direction) in enumerate(GEMMS[which].items()):
        x = torch.randn(shapes[tensor]) * (3.0, 0.02)[at] if numbers is None else numbers[tensor]
        plane = QUANTIZERS[names[tensor]]()(x).plane(direction)
        assert plane is not None
        planes.append(plane)
    return planes[0], planes[1]


@contextmanager
def twin_of(gpu: Gpu) -> Iterator[Twin]:
    """Context manager: tensors of the CPU are multiplied as on ``gpu``, natively by its twin."""
    twin = Twin(gpu.capability)
    interfaces = {"new_interface": twin.new_interface, "old_interface": twin.old_interface}
    with machine.replaced(gpu, functools.partial(run, **interfaces)):
        yield twin
