"""Sectors of global memory, turns of the banks, and instructions of warps."""

import numpy as np
import pytest

from . import Access
from .handwritten import execute


@pytest.mark.parametrize("stride, moved", [(4, 128), (8, 256), (32, 1024), (64, 1024)])
def test_sectors_that_a_stride_moves(stride: int, moved: int) -> None:
    x = np.zeros(4096, np.uint8)
    report = execute(
        f"ld.param.b64 %rd1, [k_param_0]; mad.wide.u32 %rd2, %r0, {stride}, %rd1; ld.global.b32 %r1, [%rd2];", x
    )
    sectors = report.sectors[Access("ld", 4)]
    assert (sectors.requests, sectors.wanted, sectors.moved) == (1, 128, moved)
    assert sectors.used == 128 / moved


def test_a_number_that_all_lanes_want_is_moved_once() -> None:
    report = execute("ld.param.b64 %rd1, [k_param_0]; ld.global.b32 %r1, [%rd1];", np.zeros(1, np.uint32), threads=64)
    sectors = report.sectors[Access("ld", 4)]
    assert (sectors.requests, sectors.wanted, sectors.moved) == (2, 8, 64)


@pytest.mark.parametrize("stride, turns", [(0, 1), (4, 1), (8, 2), (16, 4), (128, 32), (132, 1)])
def test_turns_of_the_banks(stride: int, turns: int) -> None:
    body = f"mov.b32 %r1, global_smem; mad.lo.s32 %r2, %r0, {stride}, %r1; st.shared.b32 [%r2], 1;"
    conflicts = execute(body, shared=8192).conflicts[Access("st", 4)]
    assert (conflicts.requests, conflicts.turns, conflicts.needed) == (1, turns, 1)


def test_wide_accesses_are_served_in_parts() -> None:
    body = "mov.b32 %r1, global_smem; mad.lo.s32 %r2, %r0, 16, %r1; st.shared.v4.b32 [%r2], {1, 2, 3, 4};"
    conflicts = execute(body, shared=512).conflicts[Access("st", 16)]
    assert (conflicts.requests, conflicts.turns, conflicts.needed) == (1, 4, 4)


def test_instructions_count_once_for_each_warp() -> None:
    report = execute(
        "setp.lt.u32 %p1, %r0, 40; @%p1 bra SKIP; mov.b32 %r1, 0; mov.b32 %r1, 0; SKIP: mov.b64 %rd1, 0;", threads=96
    )
    assert report.counts["mov.b64"] == 3 and report.counts["mov.b32"] == 4  # two of three warps have lanes there
    assert report.count("mov") == 3 + 3 + 4 and report.instructions == report.counts.total()
