"""`check_up`: look at everything."""

from __future__ import annotations

import os
import platform

from ...kernels import REFERENCE
from .backends import cache_directory, described, kernel_cache, load
from .findings import Checkup
from .gpus import gpus, why_no_gpu
from .packages import client_packages, needed_packages
from .processor import processor
from .self_test import run_self_test
from .variables import set_variables


def check_up(seconds: float = 4.0) -> Checkup:
    """Look at this machine, and compare golden vectors on every backend.

    Args:
        seconds: for how long cases of golden vectors are begun on each backend. Compiling kernels for the first time
            takes longer than running them; cases that do not fit are left out, and the result says so.
    """
    packages, found, no_gpu = needed_packages(), gpus(), why_no_gpu()
    for_cpu, for_gpu = load("cpu"), load("cuda")
    tests = [run_self_test(REFERENCE, "cpu", seconds)]
    if for_cpu.kernels is not None and for_cpu.has("cpu"):
        tests.append(run_self_test(for_cpu.kernels, "cpu", seconds))
    if for_gpu.kernels is not None and for_gpu.has("triton"):
        tests += [run_self_test(for_gpu.kernels, gpu.device, seconds) for gpu in found]
    return Checkup(
        packages,
        client_packages(),
        platform.platform(),
        processor(),
        found,
        no_gpu,
        (described("cpu", for_cpu, "cpu", None), described("cuda", for_gpu, "triton", no_gpu)),
        kernel_cache(cache_directory()),
        set_variables(os.environ),
        tuple(tests),
    )
