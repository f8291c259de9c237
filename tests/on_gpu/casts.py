"""Every cast of the kernels over all fp32 numbers, against the reference in plain torch.

The reference runs on the same device, where it is fast; that it does there what it does on the CPU is checked with
some of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from crossgrain.formats import AnyElement, get_element
from crossgrain.formats.mxint8 import INT8
from crossgrain.kernels.reference.elements import round_stochastically, round_to_nearest
from crossgrain.kernels.reference.packing import pack
from crossgrain.kernels.triton.kinds import element_kind
from crossgrain.kernels.triton.launch import Launcher
from crossgrain.kernels.triton.traits import Traits

from . import cast_kernels
from .finding import Deadline, Finding

ALL_NUMBERS = 1 << 32
_BLOCK = 1024
_WARPS = 4
ELEMENTS: dict[str, AnyElement] = {
    **{name: get_element(name) for name in ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")},
    "int8": INT8,
}


@dataclass(frozen=True)
class Chunk:
    """Numbers whose bits follow each other.

    Attributes:
        first: the bits of the first, as a signed number.
        size: how many there are.
        random: a random byte for each.
    """

    first: int
    size: int
    random: Tensor

    def numbers(self) -> Tensor:
        """The numbers, fp32."""
        following = torch.arange(self.size, dtype=torch.int32, device=self.random.device)
        return (following + self.first).view(torch.float32)


@dataclass(frozen=True)
class Cast:
    """A cast of kernels, and what it should give.

    Attributes:
        run: the result of the kernel for a chunk.
        expected: the result of the reference for numbers and random bytes.
    """

    run: Callable[[Chunk], Tensor]
    expected: Callable[[Tensor, Tensor], Tensor]


def casts(launcher: Launcher, traits: Traits) -> dict[str, Cast]:
    """All casts by name: of each element, and of each way that a device with these traits has."""
    found = {}
    for name, element in ELEMENTS.items():
        nearest = _nearest(element)
        found[f"{name}, nearest"] = Cast(_nearest_kernel(launcher, element, False), nearest)
        found[f"{name}, stochastic"] = Cast(_stochastic_kernel(launcher, element), _stochastic(element))
        if traits.fp8 and name in ("e4m3", "e5m2"):
            found[f"{name}, nearest by hardware"] = Cast(_nearest_kernel(launcher, element, True), nearest)
    if traits.fp4:
        found["e2m1, nearest by hardware"] = Cast(_fp4_kernel(launcher), _packed(_nearest(ELEMENTS["e2m1"])))
    found["bf16"] = Cast(_bf16_kernel(launcher, traits.compiled), _bits_of_bf16)
    return found


def check_cast(cast: Cast, device: torch.device, deadline: Deadline, size: int = 1 << 24, chunks: int = 0) -> Finding:
    """Compare a cast with the reference, chunk by chunk, until the time is over.

    Args:
        cast: the cast.
        device: the device.
        deadline: the end of the time.
        size: numbers of a chunk, a power of two.
        chunks: how many chunks to look at; 0 for all, which are all fp32 numbers.
    """
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)
    found, done, wrong = Finding(), 0, 0
    for number in _spread(ALL_NUMBERS // size):
        if deadline.is_over or (chunks and done == chunks):
            break
        done += 1
        chunk = Chunk(number * size - ALL_NUMBERS // 2, size, base + number % 256)
        numbers = chunk.numbers()
        actual, expected = cast.run(chunk), cast.expected(numbers, chunk.random)
        differing = int((actual != expected).sum())
        if differing:
            wrong += differing
            found.problems.append(_first_wrong(chunk, actual, expected, differing))
        found.problems += _unlike_the_cpu(cast, chunk, numbers, expected)
    if not done:
        found.problems.append("no time was left for any number")
    found.numbers = {"inputs": done * size, "share_of_all": done * size / ALL_NUMBERS, "wrong": wrong}
    return found


def _spread(count: int) -> Iterator[int]:
    """0 to ``count - 1``, a power of two, with reversed bits: what comes first is from everywhere."""
    bits = count.bit_length() - 1
    return (int(f"{number:0{max(bits, 1)}b}"[::-1], 2) if bits else 0 for number in range(count))


def _unlike_the_cpu(cast: Cast, chunk: Chunk, numbers: Tensor, expected: Tensor) -> list[str]:
    """Whether the reference gives on the CPU what it gives on the device, for some of the numbers."""
    some = slice(0, min(4096, chunk.size))
    here = cast.expected(numbers[some].cpu(), chunk.random[some].cpu())
    if torch.equal(here, expected[: len(here)].cpu()):
        return []
    return [f"the reference itself differs between the device and the CPU, from the bits {chunk.first:#x} on"]


def _first_wrong(chunk: Chunk, actual: Tensor, expected: Tensor, differing: int) -> str:
    at = int((actual != expected).nonzero()[0])
    numbers_per_result = chunk.size // len(actual)
    bits = (chunk.first + at * numbers_per_result) & 0xFFFFFFFF
    return (
        f"{differing} results differ; the first, of the bits {bits:#010x}: {int(actual[at])}, not {int(expected[at])}"
    )


# ---- kernels ---------------------------------------------------------------------------------------


def _nearest_kernel(launcher: Launcher, element: AnyElement, fp8: bool) -> Callable[[Chunk], Tensor]:
    kind = element_kind(element)

    def run(chunk: Chunk) -> Tensor:
        out = torch.empty_like(chunk.random)
        given = {"first": chunk.first, "out": out, "ELEMENT": kind, "FP8": fp8, "BLOCK": _BLOCK}
        launcher(cast_kernels.nearest_kernel, chunk.size // _BLOCK, out.device, _WARPS, given)
        return out

    return run


def _stochastic_kernel(launcher: Launcher, element: AnyElement) -> Callable[[Chunk], Tensor]:
    kind = element_kind(element)

    def run(chunk: Chunk) -> Tensor:
        out = torch.empty_like(chunk.random)
        given = {"first": chunk.first, "random": chunk.random, "out": out, "ELEMENT": kind, "BLOCK": _BLOCK}
        launcher(cast_kernels.stochastic_kernel, chunk.size // _BLOCK, out.device, _WARPS, given)
        return out

    return run


def _fp4_kernel(launcher: Launcher) -> Callable[[Chunk], Tensor]:
    def run(chunk: Chunk) -> Tensor:
        out = torch.empty(chunk.size // 8, dtype=torch.int32, device=chunk.random.device)
        given = {"first": chunk.first, "out": out, "BLOCK": _BLOCK // 8}
        launcher(cast_kernels.fp4_kernel, chunk.size // _BLOCK, out.device, _WARPS, given)
        return out.view(torch.uint8)

    return run


def _bf16_kernel(launcher: Launcher, compiled: bool) -> Callable[[Chunk], Tensor]:
    def run(chunk: Chunk) -> Tensor:
        out = torch.empty(chunk.size, dtype=torch.float32, device=chunk.random.device)
        given = {"first": chunk.first, "out": out, "COMPILED": compiled, "BLOCK": _BLOCK}
        launcher(cast_kernels.bf16_kernel, chunk.size // _BLOCK, out.device, _WARPS, given)
        return _without_nan(out)

    return run


# ---- the reference ---------------------------------------------------------------------------------


def _nearest(element: AnyElement) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda numbers, random: round_to_nearest(numbers, element)


def _stochastic(element: AnyElement) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda numbers, random: round_stochastically(numbers, element, random)


def _packed(codes: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda numbers, random: pack(codes(numbers, random).view(1, -1), 4).view(-1)


def _bits_of_bf16(numbers: Tensor, random: Tensor) -> Tensor:
    return _without_nan(numbers.to(torch.bfloat16).to(torch.float32))


def _without_nan(numbers: Tensor) -> Tensor:
    """The bits of numbers. All NaNs have the same."""
    return torch.where(numbers.isnan(), torch.nan, numbers).view(torch.int32)
