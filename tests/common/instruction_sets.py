"""Machines that announce instructions which they do not run, as some virtual machines do with AMX.

torch multiplies bfloat16 matrices with AMX where the processor announces it. Where the instruction is illegal
nevertheless, the process dies. Tests then tell oneDNN, which chooses the instructions, to do without.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX = "AVX512_CORE_BF16"
_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def avoid_illegal_instructions() -> str | None:
    """Let this process and its children do without AMX if it does not run here.

    Returns:
        What was done, for the head of the test report; None if there was nothing to do.
    """
    processor = Path("/proc/cpuinfo")
    if _VARIABLE in os.environ or not processor.exists() or "amx_bf16" not in processor.read_text():
        return None
    ended = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False)
    if ended.returncode != -signal.SIGILL:
        return None
    os.environ[_VARIABLE] = _WITHOUT_AMX
    return f"this processor announces AMX and does not run it: {_VARIABLE}={_WITHOUT_AMX}"
