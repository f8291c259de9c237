"""A launcher that compiles kernels for GPUs that are not here, and runs what was compiled in the emulator of PTX.

Arguments are bound by Triton's own function: types, constants and divisibility are those of a launch on a GPU.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from crossgrain.kernels.triton.backend import TritonBackend
from crossgrain.kernels.triton.traits import Traits, cuda_traits

from ..offline import Built
from ..offline.compile import gpu_target
from ..ptx import Pointer, Report, run

CAPABILITIES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}


class Emulated:
    """Runs kernels as compiled for a target, on CPU tensors.

    Args:
        target: one of `CAPABILITIES`.
        seen: called with what was compiled, its arguments and the report of each launch.
    """

    def __init__(self, target: str, seen: Callable[[Built, dict[str, Any], Report], None] | None = None) -> None:
        self._target = target
        self._seen = seen

    def __call__(self, kernel: Any, programs: int, device: torch.device, warps: int, arguments: dict[str, Any]) -> None:
        built = compiled(kernel, self._target, warps, arguments)
        report = run(built.ptx, (programs,), passed_arguments(kernel, arguments, built), built.shared)
        if self._seen is not None:
            self._seen(built, arguments, report)


def backend(target: str, seen: Callable[[Built, dict[str, Any], Report], None] | None = None) -> TritonBackend:
    """The backend as it would be on a GPU of this target."""
    return TritonBackend(Emulated(target, seen), traits_of(target))


def traits_of(target: str) -> Traits:
    """The conversion instructions of a target."""
    return cuda_traits(CAPABILITIES[target]) if target in CAPABILITIES else Traits(compiled=True)


def compiled(kernel: Any, target: str, warps: int, arguments: dict[str, Any]) -> Built:
    """The kernel, compiled for a target and these arguments as a launch would."""
    gpu = gpu_target(target)
    compiler = make_backend(gpu)
    options = {"num_warps": warps, "enable_fp_fusion": False, "debug": False, "instrumentation_mode": ""}
    bound, specialization, _ = create_function_from_signature(kernel.signature, kernel.params, compiler)(
        **arguments, **options
    )
    parsed, signature, constants, attributes = kernel._pack_args(compiler, options, bound, specialization, None)
    made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=gpu, options=parsed.__dict__)
    names = frozenset(kernel.arg_names[path[0]] for path in constants)
    return Built(target, dict(made.asm), made.metadata.shared, warps * gpu.warp_size, 0.0, names)


def passed_arguments(kernel: Any, arguments: dict[str, Any], built: Built) -> list[Any]:
    """The arguments that the compiled kernel takes, without constants. Tensors of one storage share an array."""
    memory: dict[int, np.ndarray[Any, Any]] = {}
    taken = [arguments[name] for name in kernel.arg_names if name not in built.constants]
    return [pointer(each, memory) if isinstance(each, torch.Tensor) else each for each in taken]


def pointer(tensor: torch.Tensor, memory: dict[int, np.ndarray[Any, Any]]) -> Pointer:
    """Where a tensor lies. ``memory`` has the arrays of the storages of one launch."""
    storage = tensor.untyped_storage()
    whole = memory.setdefault(
        storage.data_ptr(),
        torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),  # type: ignore[call-overload]
    )
    return Pointer(whole, tensor.data_ptr() - storage.data_ptr())
