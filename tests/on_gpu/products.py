"""GEMMs on a device, native and decoded, against float64, within what sums of fp32 allow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain import kernels
from crossgrain.gemm.native import machine, route
from crossgrain.gemm.operands import GEMMS
from crossgrain.gemm.product import gemm
from crossgrain.planes import Plane

from ..gpu.native.operands import FAMILIES, planes_of, shapes_of, sizes_of
from .finding import Finding

_FP32_STEP = 2.0**-23
"""Each addition of fp32 numbers is wrong by at most this times its result, also if a tensor core cuts off bits."""

_FP8_STEP = 2.0**-13
"""The same for FP8 on compute capability 8.9 and 9.0, whose tensor cores align products to the largest of them and
keep 13 bits behind its first."""


def check_products(family: str, device: torch.device) -> Finding:
    """Multiply operands of a family of formats: fprop, dgrad and wgrad, natively if the device can, and decoded."""
    found = Finding()
    for which in GEMMS:
        a, b = _operands(which, family, device)
        way = route(a, b, machine.gpu_of(device))
        told: dict[str, Any] = {"route": str(way)}
        exact, sizes = _exact(a, b)
        with cg.settings.override(native_gemms=False):
            results = {"decoded": gemm(which, a, b)}
        if way.is_native:
            with cg.settings.override(native_gemms=True):
                results["native"] = gemm(which, a, b)
        for name, result in results.items():
            step = _FP8_STEP if name == "native" and _keeps_few_bits(a, device) else _FP32_STEP
            # Of each of K additions, and of the scales that multiply the sum; fp32 numbers below 2**-126 may vanish.
            bound = (a.operand_shape[1] + 4) * step * sizes + 2.0**-126
            share = float(((result.double().cpu() - exact).abs() / bound).max())
            told[f"{name}_error_of_bound"] = share
            if not share <= 1.0:
                found.problems.append(f"{which} {name} is {share:.3g} times as wrong as sums of fp32 may be")
        found.numbers[which] = told
    return found


def check_forced(device: torch.device) -> Finding:
    """``settings.native_gemms = True`` refuses what the device would have to decode, and says why."""
    found = Finding()
    for family in FAMILIES:
        a, b = _operands("fprop", family, device)
        way = route(a, b, machine.gpu_of(device))
        said: str | None = None
        with cg.settings.override(native_gemms=True):
            try:
                gemm("fprop", a, b)
            except RuntimeError as error:
                said = str(error)
        found.numbers[family] = said or "native"
        if (said is None) != way.is_native:
            found.problems.append(f"{family}: expected {way}, and {said or 'nothing was refused'}")
        if said is not None and (way.reason or "") not in said:
            found.problems.append(f"{family}: the reason is not said: {said}")
    return found


def _operands(which: str, family: str, device: torch.device) -> tuple[Plane, Plane]:
    generator = torch.Generator().manual_seed(5)
    shapes = shapes_of(*sizes_of(family, which))
    numbers = {tensor: torch.randn(shape, generator=generator).to(device) for tensor, shape in shapes.items()}
    return planes_of(which, family, numbers)


def _exact(a: Plane, b: Plane) -> tuple[Tensor, Tensor]:
    """The product in float64 on the CPU, and the product of magnitudes."""
    left, right = (kernels.decode_operand(plane).double().cpu() for plane in (a, b))
    return left @ right.t(), left.abs() @ right.abs().t()


def _keeps_few_bits(plane: Plane, device: torch.device) -> bool:
    element = plane.format.element
    gpu = machine.gpu_of(device)
    return element is not None and element.bits == 8 and gpu is not None and gpu.capability in ((8, 9), (9, 0))
