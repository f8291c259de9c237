"""Casts of kernels over all fp32 numbers."""

from __future__ import annotations

import pytest

from .finding import Finding, attempted


def test_all_fp32_numbers_are_cast_as_the_reference_casts_them(gpu, triton_backend, time_for, tell):
    from crossgrain.kernels.triton.launch import launch
    from crossgrain.kernels.triton.traits import device_traits

    from .casts import casts, check_cast

    whole = Finding()
    each = casts(launch, device_traits(gpu))
    for name, cast in each.items():
        found = check_cast(cast, gpu, time_for(0.25 / len(each)))
        whole.numbers[name] = found.numbers
        whole.problems += [f"{name}: {problem}" for problem in found.problems]
    tell(whole)


@pytest.mark.usefixtures("triton_backend")
def test_which_random_bits_the_stochastic_instruction_uses(gpu, tell):
    import torch

    from crossgrain.kernels.triton.launch import launch

    from .stochastic_instruction import HAVE_IT, check_instruction

    capability = torch.cuda.get_device_capability(gpu)
    if torch.version.hip is not None or capability not in HAVE_IT:
        pytest.skip(f"this GPU does not have the instruction cvt.rs: {torch.cuda.get_device_name(gpu)}, {capability}")
    tell(attempted(lambda: check_instruction(launch, gpu)), only_report=True)
