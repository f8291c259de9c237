"""Environment variables that change what crossgrain does."""

from __future__ import annotations

from collections.abc import Mapping

from ...compat.environment import VARIABLES
from .findings import Variable

_OWN = {
    "CROSSGRAIN_COMPUTE_CAPABILITY": "the GPU generation whose rules apply (settings.compute_capability)",
    "CROSSGRAIN_NUM_THREADS": "the largest number of threads of CPU kernels",
}
_OF_OTHERS = {
    "NUMBA_CACHE_DIR": "where compiled CPU kernels are stored",
    "NUMBA_DISABLE_JIT": "1 switches compiled CPU kernels off",
    "NUMBA_NUM_THREADS": "no effect: crossgrain has its own threads",
    "OMP_NUM_THREADS": "threads of torch, and of CPU kernels unless CROSSGRAIN_NUM_THREADS is set",
    "ONEDNN_MAX_CPU_ISA": "limits the instructions that torch multiplies with",
    "TRITON_INTERPRET": "1 interprets GPU kernels on the CPU, which is for tests",
    "TRITON_CACHE_DIR": "where compiled GPU kernels are stored",
    "CUDA_VISIBLE_DEVICES": "which GPUs torch sees",
    "HIP_VISIBLE_DEVICES": "which AMD GPUs torch sees",
    "PYTORCH_ALLOC_CONF": "how torch allocates memory on GPUs",
}
KNOWN = {**_OWN, **_OF_OTHERS}


def set_variables(environment: Mapping[str, str]) -> tuple[Variable, ...]:
    """The variables of an environment that matter here, and what each does."""
    found = [Variable(name, environment[name], effect) for name, effect in KNOWN.items() if name in environment]
    of_transformer_engine = {variable.name: variable for variable in VARIABLES}
    for name, value in sorted(environment.items()):
        if name in of_transformer_engine:
            variable = of_transformer_engine[name]
            ignored = not variable.obeyed and value not in variable.neutral
            found.append(Variable(name, value, f"no effect here: {variable.here}" if ignored else variable.here))
        elif name.startswith("CROSSGRAIN_") and name not in KNOWN:
            found.append(Variable(name, value, "no effect: crossgrain reads no variable of this name"))
    return tuple(found)
