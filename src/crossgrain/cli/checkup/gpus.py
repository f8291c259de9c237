"""The GPUs, and how layers of each format are multiplied on them."""

from __future__ import annotations

import torch

from ...formats import Format, get_format
from ...gemm.native import Gpu as GemmGpu
from ...gemm.native import explain, gpu_of
from .findings import Gpu

_SIZE = 4096  # tokens, inputs and outputs of the layer that is asked about: a multiple of everything
_LAYERS = {  # formats of input, weight and grad_output
    "fp8": ("fp8", "fp8", "fp8_e5m2"),
    "fp8_block": ("fp8_block", "fp8_block_2d", "fp8_block"),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8"),
    "nvfp4": ("nvfp4", "nvfp4_2d", "nvfp4"),
    "mxfp4": ("mxfp4", "mxfp4", "mxfp4"),
}


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch finds."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))


def why_no_gpu() -> str | None:
    """Why torch finds no GPU; None if it finds one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built without CUDA and ROCm"
    built = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"
    return f"torch was built for {built}, and finds no GPU or no driver for it"


def gemms_of(gpu: GemmGpu) -> dict[str, str]:
    """How the three GEMMs of a layer in each format would run on a GPU."""
    return {name: _told(_formats(*formats), gpu) for name, formats in _LAYERS.items()}


def _gpu(device: torch.device) -> Gpu:
    properties, gpu = torch.cuda.get_device_properties(device), gpu_of(device)
    assert gpu is not None
    return Gpu(str(device), properties.name, str(gpu), properties.total_memory, gemms_of(gpu))


def _formats(*names: str) -> dict[str, Format | tuple[Format, Format]]:
    return dict(zip(("input", "weight", "grad_output"), map(get_format, names), strict=True))


def _told(formats: dict[str, Format | tuple[Format, Format]], gpu: GemmGpu) -> str:
    routes = explain(formats, _SIZE, _SIZE, _SIZE, gpu)
    ways = {str(route) for route in routes.values()}
    if len(ways) == 1:
        return ways.pop()
    return "; ".join(f"{gemm} {route}" for gemm, route in routes.items())
