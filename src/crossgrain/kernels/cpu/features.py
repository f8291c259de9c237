"""What the CPU that kernels are compiled for can do: this CPU, or the one that numba is configured for.

Machine code on disk is kept apart by numba for each CPU and its features, so a kernel may differ between them.
"""

from __future__ import annotations

from functools import lru_cache

from llvmlite import binding
from numba.core import config
from numba.core.codegen import get_host_cpu_features

_ADD = "define {0} @f({0} %a) {{\n %b = add {0} %a, %a\n ret {0} %b\n}}"
# Code that LLVM compiles to an instruction with this name, and these registers, if the CPU has the feature.
_SHOWN_BY = {
    "avx2": (_ADD.format("<8 x i32>"), "vpaddd", "ymm"),
    "fma": (
        "declare float @llvm.fma.f32(float, float, float)\n"
        "define float @f(float %a) {\n %b = call float @llvm.fma.f32(float %a, float %a, float %a)\n ret float %b\n}",
        "vfmadd",
        "xmm",
    ),
    "avx512f": (_ADD.format("<16 x i32>"), "vpaddd", "zmm"),
    "avx512bw": (_ADD.format("<32 x i16>"), "vpaddw", "zmm"),
    "avx512vnni": (
        "declare <16 x i32> @llvm.x86.avx512.pmaddw.d.512(<32 x i16>, <32 x i16>)\n"
        "define <16 x i32> @f(<16 x i32> %a, <32 x i16> %b) {\n"
        " %c = call <16 x i32> @llvm.x86.avx512.pmaddw.d.512(<32 x i16> %b, <32 x i16> %b)\n"
        " %d = add <16 x i32> %a, %c\n ret <16 x i32> %d\n}",
        "vpdpwssd",
        "zmm",
    ),
}
_NEEDED_TO_ASK = {"avx512vnni": "avx512bw"}  # LLVM ends the process at an instruction that the CPU lacks


def compiled_for(*features: str) -> bool:
    """Whether kernels may use all of these features, by their names in LLVM: ``compiled_for("avx512f")``."""
    name, named = (getattr(config, each, None) for each in ("CPU_NAME", "CPU_FEATURES"))
    if name is None and named is None and getattr(config, "ENABLE_AVX", True):
        found = binding.get_host_cpu_features()
        return all(found.get(feature, False) for feature in features)
    cpus = [
        (binding.get_host_cpu_name() if name is None else name, get_host_cpu_features() if named is None else named)
    ]
    if name is not None and named is None:
        # numba adds the features of this CPU to those of the one that is named, which need not have them.
        cpus.append((name, "+64bit" if binding.get_default_triple().startswith("x86_64") else ""))
    return all(_shows(feature, *cpu) for feature in features for cpu in cpus)


@lru_cache
def _shows(feature: str, name: str, named: str) -> bool:
    """Whether a CPU has a feature, seen in what LLVM makes for it: LLVM has no list to ask for.

    Names of features do not say it: one that is taken away, or implied by another one, takes or brings others along.
    """
    if feature not in _SHOWN_BY:
        return False
    if feature in _NEEDED_TO_ASK and not _shows(_NEEDED_TO_ASK[feature], name, named):
        return False
    code, instruction, register = _SHOWN_BY[feature]
    binding.initialize_native_target()  # twice does no harm; numba does it when it compiles
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(cpu=name, features=named)
    return any(
        instruction in line and register in line
        for line in machine.emit_assembly(binding.parse_assembly(code)).splitlines()
    )
