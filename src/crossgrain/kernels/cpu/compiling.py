"""Kernels, and their parts, which are compiled to code that is linked into kernels and to nothing else.

numba compiles each function for its own use first: it optimizes the function with all that it calls, makes machine code
and a wrapper by which Python could call it. A part of a kernel needs none of this. It is optimized once, inside of the
kernel; a kernel is compiled in less than half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import njit
from numba._dynfunc import make_function
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering
from numba.extending import overload

from .disk_cache import cached_on_disk

_NOT_CALLABLE = "A part of kernels, which cannot be called from Python."


class _Part(JITCodeLibrary):
    """The code of a part: linked with what it calls, neither optimized nor made executable."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerPart(NativeLowering):
    """numba's own pass, without the steps that make a function callable from Python."""

    _name = "crossgrain_lower_part"

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        made, library = state.cr.fndesc, state.library
        key = make_function(made.lookup_module(), made.qualname, _NOT_CALLABLE, 0, state.cr.env, (library,))
        state.targetctx.insert_user_function(key, made, [library])  # callers find the part by the key
        state["cr"] = state.cr._replace(cfunc=key)
        return True


class _PartCompiler(CompilerBase):
    """numba's compiler, with `_LowerPart` in the place of its last step."""

    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [
            (_LowerPart, name) if step is NativeLowering else (step, name) for step, name in pipeline.passes
        ]
        pipeline.finalize()
        return [pipeline]


_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "forceinline": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _PartCompiler,
}

inner = njit(**_OPTIONS)
"""For what kernels call; compiled into them."""

overloaded = partial(overload, jit_options=_OPTIONS)  # type: ignore[arg-type]
"""`numba.extending.overload` for what kernels call."""


def kernel(function: Callable[..., Any]) -> Any:
    """For what is called from Python. It takes a tag, so that its cached machine code is of these sources."""
    return cached_on_disk(njit(nogil=True, error_model="numpy")(function))
