"""Triton kernels to machine code, for any target, without its GPU or driver.

Triton keeps what it compiled on disk (``TRITON_CACHE_DIR``), so a second build costs little.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from .result import Built

_CUDA = {f"sm_{number}": number for number in (80, 86, 89, 90, 100, 103, 120)}
_HIP = {"gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1201": 32}  # threads of a wave
TARGETS = (*_CUDA, *_HIP)


@dataclass(frozen=True)
class Constant:
    """A constexpr inside of a tuple argument."""

    value: object


Type = str | tuple[Any, ...]  # "*bf16", "i32", or for a tuple argument a tuple of types and Constants


def build(
    kernel: object,
    signature: Mapping[str, Type],
    constants: Mapping[str, object],
    target: str,
    *,
    divisible: Iterable[str] = (),
    num_warps: int = 4,
    **options: object,
) -> Built:
    """Compile a kernel, by default without fused multiply-adds.

    Args:
        kernel: A function under ``triton.jit``.
        signature: The type of each argument that is no constexpr. A tuple argument has a tuple of types, a NamedTuple
            if the kernel reads its fields by name, and may hold a ``Constant``.
        constants: The constexprs.
        target: One of TARGETS.
        divisible: Arguments that are multiples of 16, as pointers mostly are: "x", or "pair.x" inside of a tuple.
        num_warps: Warps of a block.
        **options: Options of Triton, such as ``num_stages``.

    Raises:
        ValueError: Arguments are missing or unknown, or the kernel cannot be compiled at all.
    """
    if not isinstance(kernel, JITFunction):
        raise ValueError(
            f"{kernel} is no compiled kernel but a {type(kernel).__name__}: with TRITON_INTERPRET=1 in the environment "
            "triton.jit makes interpreted functions; compile in a process without it"
        )
    if target not in TARGETS:
        raise ValueError(f"target {target} is none of {', '.join(TARGETS)}")
    names = list(kernel.arg_names)
    given = [*signature, *constants]
    if sorted(given) != sorted(names):
        raise ValueError(f"the kernel has the arguments {', '.join(names)}; got {', '.join(given)}")
    types = {name: _types_only(signature[name]) if name in signature else "constexpr" for name in names}
    constexprs: dict[tuple[int, ...], object] = {(names.index(name),): value for name, value in constants.items()}
    for name, each in signature.items():
        constexprs |= {(names.index(name), *path): value for path, value in _nested_constants(each)}
    attributes = {_path(each, names, signature): [["tt.divisibility", 16]] for each in divisible}
    source = ASTSource(kernel, types, constexprs=constexprs, attrs=attributes)
    start = time.perf_counter()
    made = triton.compile(
        source, target=gpu_target(target), options={"num_warps": num_warps, "enable_fp_fusion": False, **options}
    )
    threads = num_warps * (32 if target in _CUDA else _HIP[target])
    return Built(
        target, dict(made.asm), made.metadata.shared, threads, time.perf_counter() - start, frozenset(constants)
    )


def gpu_target(name: str) -> GPUTarget:
    """Triton's name of a target."""
    return GPUTarget("cuda", _CUDA[name], 32) if name in _CUDA else GPUTarget("hip", name, _HIP[name])


def _types_only(types: Any) -> Any:
    """Tuples as Triton wants them, with the word constexpr for constants."""
    if isinstance(types, Constant):
        return "constexpr"
    if not isinstance(types, tuple):
        return types
    items = [_types_only(each) for each in types]
    return type(types)(*items) if hasattr(types, "_fields") else tuple(items)


def _nested_constants(types: Any) -> Iterator[tuple[tuple[int, ...], object]]:
    for number, each in enumerate(types if isinstance(types, tuple) else ()):
        if isinstance(each, Constant):
            yield (number,), each.value
        for path, value in _nested_constants(each):
            yield (number, *path), value


def _path(place: str, names: list[str], signature: Mapping[str, Type]) -> tuple[int, ...]:
    """Numbers on the way to an argument: "pair.x" is (place of pair, place of x in it)."""
    first, *fields = place.split(".")
    if first not in signature:
        raise ValueError(f"{first} is no argument with a type")
    found: tuple[int, ...] = (names.index(first),)
    here: Any = signature[first]
    for each in fields:
        number = int(each) if each.isdigit() else list(getattr(here, "_fields", ())).index(each)
        found, here = (*found, number), here[number]
    return found
