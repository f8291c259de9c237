"""Training on the GPU and on the CPU."""

from __future__ import annotations

import pytest

from .finding import Finding
from .layer_planes import PRESETS, check_planes
from .training import check_losses, check_runs

pytestmark = pytest.mark.usefixtures("triton_backend")


def test_planes_of_the_first_step_are_those_of_the_cpu(gpu, tell):
    tell(_of_presets(lambda preset: check_planes(preset, gpu)))


def test_losses_are_those_of_the_cpu(gpu, tell):
    tell(_of_presets(lambda preset: check_losses(preset, gpu)))


def test_every_way_through_the_library_gives_the_results_of_the_cpu(gpu, time_for, tell):
    tell(check_runs(gpu, time_for(0.15)))


def _of_presets(check) -> Finding:
    found = {preset: check(preset) for preset in PRESETS}
    problems = [f"{preset}: {problem}" for preset, each in found.items() for problem in each.problems]
    return Finding({preset: each.numbers for preset, each in found.items()}, problems)
