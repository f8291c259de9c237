"""The limits that compiled kernels keep: no spills, no inexact instructions, wide accesses, few instructions."""

from pathlib import Path

import pytest
import triton

from .figures import built, instructions_per_element, shared_memory
from .launches import (
    FP8_DECODED,
    MXFP8_BOTH,
    MXFP8_COLUMN_DECODED,
    MXFP8_DECODED,
    NVFP4_DECODED,
    NVFP4_ROTATED,
    WORK,
    Work,
)
from .roof import GPUS
from .table import rows

NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx942", "gfx950")

# Instructions for each number. Before sm_89 there are no instructions that convert to and from 8 bits.
CEILINGS: dict[Work, dict[str, float]] = {
    MXFP8_BOTH: {"sm_80": 41, "sm_89": 16, "sm_90": 15, "sm_100": 15, "sm_120": 15},
    NVFP4_ROTATED: dict.fromkeys(NVIDIA, 43) | {"sm_80": 48},
    MXFP8_DECODED: dict.fromkeys(NVIDIA, 6) | {"sm_80": 14},
    MXFP8_COLUMN_DECODED: dict.fromkeys(NVIDIA, 6) | {"sm_80": 14},
    FP8_DECODED: dict.fromkeys(NVIDIA, 6) | {"sm_80": 12},
    NVFP4_DECODED: dict.fromkeys(NVIDIA, 6) | {"sm_80": 10},
}

# What another Triton than that of torch makes of the same kernels. Tiles are chosen for 3.7.1.
PINNED = triton.__version__ == "3.7.1"
if not PINNED:
    CEILINGS[NVFP4_DECODED] |= dict.fromkeys(("sm_89", "sm_90", "sm_100", "sm_120"), 6.5)
SPILLED = {  # bytes of a thread
    ("3.9.0", "MXFP6, both planes", "sm_100"): 16,
    ("3.9.0", "FP8 1x128 stochastic, both planes", "sm_120"): 32,
}

# Amaxes down columns of 128 are exchanged between warps, in one place of shared memory for each.
WITH_CONFLICTS = {"FP8 1x128, both planes", "FP8 1x128 stochastic, both planes", "FP8 128x128, both planes"}

QUICK = [(MXFP8_BOTH, "sm_90"), (NVFP4_ROTATED, "sm_90"), (MXFP8_DECODED, "sm_90"), (MXFP8_COLUMN_DECODED, "sm_90")]
EACH = pytest.mark.parametrize(
    "work, target",
    [
        pytest.param(
            work, target, marks=() if (work, target) in QUICK else pytest.mark.long, id=f"{work.name}-{target}"
        )
        for work in WORK
        for target in NVIDIA
    ],
)


@EACH
def test_no_spills_and_nothing_inexact(work: Work, target: str) -> None:
    code, _ = built(work, target)
    assert code.spills == SPILLED.get((triton.__version__, work.name, target), 0)
    assert not code.inexact


@EACH
def test_instructions(work: Work, target: str) -> None:
    ceiling = CEILINGS.get(work, {}).get(target)
    if ceiling is None:
        assert instructions_per_element(work, target) > 0
    else:
        assert instructions_per_element(work, target) <= ceiling


@EACH
def test_shared_memory_has_no_conflicts(work: Work, target: str) -> None:
    conflicts = shared_memory(work, target)
    assert (conflicts.turns > conflicts.needed) == (work.name in WITH_CONFLICTS and PINNED)


@pytest.mark.parametrize(
    "work",
    [
        MXFP8_BOTH,
        pytest.param(NVFP4_ROTATED),
        *(pytest.param(work, marks=pytest.mark.long) for work in (MXFP8_DECODED, FP8_DECODED)),
    ],
    ids=lambda work: work.name,
)
def test_inputs_and_codes_move_16_bytes_at_once(work: Work) -> None:
    """Loads and stores that are narrower are those of scales, amaxes and seeds."""
    code, launch = built(work, "sm_90")
    wide = sum(size * count for (_, size), count in code.widths.items() if size == 16) * code.threads
    scales = launch.elements / 8
    assert wide >= launch.elements * work.bytes - scales


@pytest.mark.long
@pytest.mark.parametrize("target", AMD)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.name)
def test_kernels_compile_for_amd(work: Work, target: str) -> None:
    code, _ = built(work, target)
    assert code.asm["hsaco"]
    assert code.spills == 0


def test_mxfp8_reaches_most_of_the_bandwidth_of_an_h100() -> None:
    h100 = next(gpu for gpu in GPUS if gpu.name.startswith("H100"))
    assert h100.bandwidth_share(MXFP8_BOTH.bytes, instructions_per_element(MXFP8_BOTH, h100.target)) >= 0.8


@pytest.mark.long
@pytest.mark.skipif(not PINNED, reason="the table is that of Triton 3.7.1")
def test_the_table_of_the_documentation_is_up_to_date() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "gpu.md").read_text()
    assert "\n".join(rows()) in page
