"""Which instructions kernels are compiled for: those of this CPU, or of the one that numba is configured for.

Machine code on disk is kept apart by numba for each CPU and its features, so a kernel may depend on them.
"""

from __future__ import annotations

from functools import lru_cache

from llvmlite import binding
from numba.core import config

# Code that LLVM compiles to an instruction with this name, and these registers, if the CPU has the feature.
_SHOWN_BY = {
    "avx2": ("define <8 x i32> @f(<8 x i32> %a) {\n %b = add <8 x i32> %a, %a\n ret <8 x i32> %b\n}", "vpaddd", "ymm"),
    "fma": (
        "declare float @llvm.fma.f32(float, float, float)\n"
        "define float @f(float %a) {\n %b = call float @llvm.fma.f32(float %a, float %a, float %a)\n ret float %b\n}",
        "vfmadd",
        "xmm",
    ),
}


def compiled_for(*features: str) -> bool:
    """Whether kernels may use all of these features, by their names in LLVM: ``compiled_for("avx512f")``."""
    name, named = (getattr(config, each, None) for each in ("CPU_NAME", "CPU_FEATURES"))
    if name or named:
        return all(_configured(feature, name or "", named or "") for feature in features)
    found = binding.get_host_cpu_features()
    return all(found.get(feature, False) for feature in features)


@lru_cache
def _configured(feature: str, name: str, named: str) -> bool:
    """Whether a CPU that the user named has a feature: said so, or seen in what LLVM makes for it.

    LLVM has no list of the features of a CPU to ask for. What cannot be seen (AVX-512, whose long vectors LLVM
    avoids on some CPUs) has to be said: ``NUMBA_CPU_FEATURES=+avx512f``.
    """
    if f"+{feature}" in named.split(","):
        return True
    if feature not in _SHOWN_BY:
        return False
    code, instruction, register = _SHOWN_BY[feature]
    binding.initialize_native_target()  # twice does no harm; numba does it when it compiles
    binding.initialize_native_asmprinter()
    cpu = name or binding.get_host_cpu_name()
    machine = binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=named)
    return any(
        instruction in line and register in line
        for line in machine.emit_assembly(binding.parse_assembly(code)).splitlines()
    )
