"""The CPU: what it announces, and whether it runs what torch would use."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import torch

from .findings import Processor

FEATURES = {  # by the names that Linux has for them
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "AVX-512 bf16": ("avx512_bf16",),
    "AMX": ("amx_bf16",),
    "NEON": ("asimd", "neon"),
}
_X86 = ("AVX2", "AVX-512", "VNNI", "AVX-512 bf16", "AMX")
_LIMIT = "ONEDNN_MAX_CPU_ISA"
_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The CPU of this machine.

    Args:
        cpuinfo: the file in which Linux describes it. Other systems have none, and tell less.
    """
    described = _described(cpuinfo)
    flags = (described.get("flags") or described.get("Features") or "").split()
    if not flags and platform.machine() in ("arm64", "aarch64"):
        flags = ["neon"]  # every such CPU has it
    features = tuple(name for name, names in FEATURES.items() if any(each in flags for each in names))
    expected = ("NEON",) if platform.machine() in ("arm64", "aarch64") else _X86
    return Processor(
        described.get("model name") or platform.processor() or platform.machine(),
        os.cpu_count() or 1,
        torch.get_num_threads(),
        features,
        tuple(name for name in expected if name not in features),
        amx_problem() if "AMX" in features else None,
    )


def amx_problem() -> str | None:
    """Why torch's bf16 products end the process on a CPU that announces AMX; None if they do not.

    Some virtual machines announce these instructions and do not run them. They are tried in a process of their own.
    """
    if _LIMIT in os.environ:
        return None
    ended = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False)
    if ended.returncode != -signal.SIGILL:
        return None
    return (
        "the CPU announces AMX and does not run it: products of bf16 matrices end the process. "
        f"Set {_LIMIT}=AVX512_CORE_BF16 in the environment"
    )


def _described(cpuinfo: Path) -> dict[str, str]:
    """What Linux says about the first processor."""
    try:
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    parts = [line.partition(":") for line in lines]
    return {name.strip(): value.strip() for name, _, value in parts}
