"""`price`: the time of a GEMM on a device, at published rates."""

from __future__ import annotations

from typing import NamedTuple

from .devices import KINDS, Device
from .layer_cost import Gemm


class Price(NamedTuple):
    """The time of a GEMM.

    Attributes:
        kind: the kind of elements that is multiplied: bf16 if the device cannot multiply the format.
        seconds: the longer one of two times: operations at the peak rate, and bytes at the bandwidth of the memory.
        missing: the kind of elements for which no rate is known, so that it is counted as bf16; None if there is one.
        decoded: the device does not multiply the format natively, so that operands are decoded to bf16.
    """

    kind: str
    seconds: float
    missing: str | None = None
    decoded: bool = False


def price(gemm: Gemm, device: Device, efficiency: float = 1.0) -> Price:
    """The time of a GEMM on a device.

    Args:
        gemm: the GEMM.
        device: the device.
        efficiency: the part of the peak rate that is reached.
    """
    kind, missing, decoded = gemm.kind, None, False
    if kind not in KINDS and device.rate(kind) is None:
        kind, missing = "bf16", kind
    elif not device.multiplies(kind, gemm.scaling):
        kind, decoded = "bf16", True
    rate = device.rate(kind)
    assert rate is not None
    seconds = max(gemm.flops / (rate * 1e12 * efficiency), gemm.bytes / (device.bandwidth * 1e9))
    return Price(kind, seconds, missing, decoded)
