"""`Traits`: what the kernels for a device may use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Traits:
    """Conversion instructions of a device.

    Attributes:
        compiled: kernels are compiled. In Triton's interpreter, casts to bf16 truncate, and maxima do not skip NaNs.
        fp8: there is an instruction from fp32 to E4M3 and E5M2.
        fp4: there is an instruction from fp32 to E2M1.
        pairs: fp32 numbers are computed in pairs, in registers next to each other, of which kernels then need more.
        crowded: the assembler of these GPUs needs more registers for the same kernels.
    """

    compiled: bool = False
    fp8: bool = False
    fp4: bool = False
    pairs: bool = False
    crowded: bool = False


SOFTWARE = Traits()
"""Everything on bits, for the interpreter."""


def cuda_traits(capability: tuple[int, int]) -> Traits:
    """The traits of an NVIDIA GPU."""
    return Traits(
        compiled=True,
        fp8=capability >= (8, 9),
        fp4=capability >= (10, 0),
        pairs=capability[0] == 10,
        crowded=capability[0] == 12,
    )


HIP_TRAITS = Traits(compiled=True)
"""AMD GPUs: their instructions for 8 and 4 bits differ from generation to generation, so casts are on bits."""


@lru_cache(maxsize=64)
def device_traits(device: torch.device) -> Traits:
    """The traits of a device. Reading them does not wait for it."""
    if device.type != "cuda":
        return SOFTWARE
    if torch.version.hip is not None:
        return HIP_TRAITS
    return cuda_traits(torch.cuda.get_device_capability(device))
