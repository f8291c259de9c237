"""Which instructions kernels are compiled for: those of this CPU, or of the one that numba is configured for.

Machine code on disk is kept apart by numba for each CPU and its features, so a kernel may depend on them.
"""

from __future__ import annotations

from llvmlite import binding
from numba.core import config


def compiled_for(*features: str) -> bool:
    """Whether kernels may use all of these features, by their names in LLVM: ``compiled_for("avx512f")``."""
    chosen = {name: getattr(config, name, None) for name in ("CPU_NAME", "CPU_FEATURES")}
    if any(chosen.values()):
        named = (chosen["CPU_FEATURES"] or "").split(",")
        return all(f"+{feature}" in named for feature in features)
    found = binding.get_host_cpu_features()
    return all(found.get(feature, False) for feature in features)
