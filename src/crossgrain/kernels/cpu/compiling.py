"""Kernels, and their parts, which are compiled to code that is linked into kernels and to nothing else.

numba compiles each function for its own use first: it optimizes the function with all that it calls, makes machine code
and a wrapper by which Python could call it. A part of a kernel needs none of this. It is optimized once, inside of the
kernel; a kernel is compiled in less than half of the time.

Most of the time that is left is numba's own, in Python. So steps for what no kernel contains are left out, and Python's
garbage collector waits: it would look at all objects of torch and numba again and again. The machine code is the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from numba import njit
from numba._dynfunc import make_function
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
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


_NOT_NEEDED = {  # steps of numba for what kernels and their parts do not contain
    "WithLifting",  # `with`
    "InlineClosureLikes", "MakeFunctionToJitFunction",  # functions inside of functions, comprehensions
    "RewriteDynamicRaises",  # `raise`
    "InlineInlinables", "InlineOverloads",  # `inline="always"`
    "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass",  # `literally`, `literal_unroll`
    "NopythonRewrites",  # expressions of arrays
    "DumpParforDiagnostics",  # `prange`
}  # fmt: skip


_steps: dict[Any, list[PassManager]] = {}


def _steps_to(lowering: Any, state: Any) -> list[PassManager]:
    """The steps of compiling, the last of which is ``lowering``. All functions have the same; they hold nothing."""
    if lowering not in _steps:
        steps = PassManager("crossgrain")
        for step, name in DefaultPassBuilder.define_nopython_pipeline(state).passes:
            if step.__name__ not in _NOT_NEEDED:
                steps.add_pass(lowering if step is NativeLowering else step, name)
        steps.finalize()
        _steps[lowering] = [steps]
    return _steps[lowering]


class _KernelCompiler(CompilerBase):
    """numba's compiler, without what kernels do not need."""

    def define_pipelines(self) -> list[PassManager]:
        return _steps_to(NativeLowering, self.state)


class _PartCompiler(CompilerBase):
    """The same, with `_LowerPart` in the place of its last step."""

    def define_pipelines(self) -> list[PassManager]:
        return _steps_to(_LowerPart, self.state)


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
    return cached_on_disk(njit(nogil=True, error_model="numpy", pipeline_class=_KernelCompiler)(function))


@contextmanager
def collector_waiting() -> Iterator[None]:
    """Python's garbage collector does not run by itself inside of this. One thread at a time may be here.

    Whether it is on is left alone: another thread may change that.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:  # nobody has set another one
            gc.set_threshold(*thresholds)
