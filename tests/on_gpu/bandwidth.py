"""How many bytes per second kernels read and write, beside a copy. Nothing is asserted: it is only reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from crossgrain import kernels
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Target
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction, Plane, empty_plane

from ..gpu.kernels.formats import ALL
from .finding import Finding

PLANES: dict[str, tuple[tuple[Direction, str], ...]] = {
    "mxfp8 rowwise": ((ROWWISE, "mxfp8"),),
    "mxfp8 both": ((ROWWISE, "mxfp8"), (COLUMNWISE, "mxfp8")),
    "nvfp4 rowwise": ((ROWWISE, "nvfp4"),),
    "nvfp4 rowwise, stochastic": ((ROWWISE, "nvfp4_sr"),),
    "nvfp4 columnwise, rotated, stochastic": ((COLUMNWISE, "nvfp4_rht_sr"),),
    "mxfp8 rowwise, nvfp4 columnwise rotated stochastic": ((ROWWISE, "mxfp8"), (COLUMNWISE, "nvfp4_rht_sr")),
    "nvfp4_2d both": ((ROWWISE, "nvfp4_2d"), (COLUMNWISE, "nvfp4_2d")),
    "nvfp4 with 4-over-6, rowwise": ((ROWWISE, "nvfp4_4over6_mse"),),
    "fp8 rowwise": ((ROWWISE, "fp8"),),
    "fp8_block both": ((ROWWISE, "fp8_block"), (COLUMNWISE, "fp8_block")),
    "fp8_block_2d both": ((ROWWISE, "fp8_block_2d"), (COLUMNWISE, "fp8_block_2d")),
    "mxfp4 both": ((ROWWISE, "mxfp4"), (COLUMNWISE, "mxfp4")),
    "mxfp6_e2m3 rowwise": ((ROWWISE, "mxfp6_e2m3"),),
}


def check_bandwidth(name: str, device: torch.device, size: int = 8192, repeats: int = 20) -> Finding:
    """Measure amax passes, encoding and decoding of planes of a bf16 matrix [size, size]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 1024, generator=generator).repeat(1, max(1, size // 1024))[:, :size]
    x = x.to(torch.bfloat16).contiguous().to(device)
    copy = copied_bytes_per_second(x, repeats)
    targets = [_target(x, direction, encoding) for direction, encoding in PLANES[name]]
    ready = kernels.measure(x, targets)
    written = sum(plane_bytes(target.plane) for target in ready)
    rates = {"encode": _rate(lambda: kernels.encode(x, ready, 7), x.nbytes + written, device, repeats)}
    if any(target.needs_amax for target in targets):
        passes = len({target.encoding.format.rotation for target in targets if target.needs_amax})
        rates["measure"] = _rate(lambda: kernels.measure(x, targets), passes * x.nbytes, device, repeats)
    for target in ready:
        plane = target.plane
        bytes_ = plane_bytes(plane) + x.nbytes
        rates[f"decode {plane.direction.value}"] = _rate(
            lambda plane=plane: kernels.decode_bf16(plane), bytes_, device, repeats
        )
    numbers = {"copy_gb_per_second": copy / 1e9}
    for action, rate in rates.items():
        numbers |= {f"{action}_gb_per_second": rate / 1e9, f"{action}_share_of_copy": rate / copy}
    return Finding(numbers)


def copied_bytes_per_second(x: Tensor, repeats: int) -> float:
    """Bytes that a copy of a tensor reads and writes in a second."""
    other = torch.empty_like(x)
    return _rate(lambda: other.copy_(x), 2 * x.nbytes, x.device, repeats)


def plane_bytes(plane: Plane) -> int:
    """The size of all buffers of a plane."""
    return sum(buffer.nbytes for buffer in (plane.data, plane.scale, plane.amax) if buffer is not None)


def _target(x: Tensor, direction: Direction, name: str) -> Target:
    encoding: Encoding = ALL[name](direction)
    return Target(empty_plane(encoding.format, direction, x.shape, device=x.device), encoding)


def _rate(action: Callable[[], object], bytes_: int, device: torch.device, repeats: int) -> float:
    for _ in range(3):
        action()
    return bytes_ / median(_seconds(action, device) for _ in range(repeats))


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """The time of an action on a device, by its own clock if it is a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        action()
        return max(time.perf_counter() - start, 1e-9)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        first.record()
        action()
        last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000
