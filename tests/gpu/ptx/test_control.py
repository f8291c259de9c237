"""Branches, loops, returns and barriers: every lane goes its own way."""

import numpy as np
import pytest

from . import PtxError, run
from .handwritten import execute, kernel


def test_lanes_take_different_branches_and_meet_again() -> None:
    out = np.zeros(64, np.uint32)
    report = execute(
        """and.b32 %r1, %r0, 1; setp.eq.b32 %p1, %r1, 0; @%p1 bra EVEN;
        mov.b32 %r2, 100; bra.uni DONE;
        EVEN: mov.b32 %r2, 200;
        DONE: shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1; add.s32 %r4, %r2, %r0; st.global.b32 [%rd0], %r4;""",
        out, threads=64,
    )  # fmt: skip
    assert out.tolist() == [(200 if i % 2 == 0 else 100) + i for i in range(64)]
    assert report.counts["shfl.sync.bfly.b32"] == 2  # once for each warp: all lanes together


def test_loops_end_for_each_lane_in_its_own_time() -> None:
    out = np.zeros(64, np.uint32)
    execute(
        """mov.b32 %r1, 0; mov.b32 %r2, 0;
        AGAIN: setp.ge.u32 %p1, %r1, %r0; @%p1 bra DONE;
        add.s32 %r2, %r2, %r1; add.s32 %r1, %r1, 1; bra AGAIN;
        DONE: st.global.b32 [%rd0], %r2;""",
        out, threads=64,
    )  # fmt: skip
    assert out.tolist() == [i * (i - 1) // 2 for i in range(64)]


def test_blocks_return_early() -> None:
    out = np.zeros(4, np.uint32)
    execute(
        """mov.u32 %r1, %ctaid.x; setp.ge.u32 %p1, %r1, 2; @%p1 ret;
        bar.sync 0; ld.param.b64 %rd5, [k_param_0]; mad.wide.u32 %rd5, %r1, 4, %rd5; st.global.b32 [%rd5], 1;""",
        out, blocks=4,
    )  # fmt: skip
    assert out.tolist() == [1, 1, 0, 0]


def test_a_grid_of_three_dimensions() -> None:
    out = np.zeros((5, 3, 2), np.uint32)
    body = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;
        mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y; mad.lo.s32 %r6, %r3, %r5, %r2; mad.lo.s32 %r7, %r6, %r4, %r1;
        ld.param.b64 %rd0, [k_param_0]; mad.wide.u32 %rd1, %r7, 4, %rd0;
        mul.lo.s32 %r8, %r3, 100; mad.lo.s32 %r9, %r2, 10, %r8; add.s32 %r10, %r9, %r1; st.global.b32 [%rd1], %r10;"""
    run(kernel(body), (2, 3, 5), [out], 0)
    assert np.array_equal(out, np.fromfunction(lambda z, y, x: 100 * z + 10 * y + x, (5, 3, 2)))


def test_a_barrier_in_a_branch_that_not_all_threads_take() -> None:
    for jump in ("@%p1 bra AFTER;", "@%p1 ret;"):
        with pytest.raises(PtxError, match="only 32 of 64 threads of a block come to the barrier: bar.sync 0"):
            execute(f"setp.lt.u32 %p1, %r0, 32; {jump} bar.sync 0; AFTER: mov.b32 %r1, 0;", threads=64)
    with pytest.raises(PtxError, match="only 16 of 32 threads"):
        execute("setp.lt.u32 %p1, %r0, 16; @%p1 bar.sync 0;")


def test_threads_at_different_barriers_do_not_meet() -> None:
    with pytest.raises(PtxError, match="only 32 of 64 threads"):
        execute("setp.lt.u32 %p1, %r0, 32; @%p1 bra OTHER; bar.sync 0; ret; OTHER: bar.sync 0;", threads=64)


def test_warps_wait_for_each_other_at_a_barrier() -> None:
    """One warp loops before the barrier, the other does not."""
    out = np.zeros(64, np.uint32)
    execute(
        """mov.b32 %r1, global_smem; shr.u32 %r2, %r0, 5; mul.lo.s32 %r3, %r2, 10;
        AGAIN: setp.eq.b32 %p1, %r3, 0; @%p1 bra STORE; sub.s32 %r3, %r3, 1; bra AGAIN;
        STORE: shl.b32 %r4, %r0, 2; add.s32 %r5, %r1, %r4; st.shared.b32 [%r5], %r0;
        bar.sync 0; xor.b32 %r6, %r4, 128; add.s32 %r7, %r1, %r6; ld.shared.b32 %r8, [%r7];
        st.global.b32 [%rd0], %r8;""",
        out, threads=64, shared=256,
    )  # fmt: skip
    assert out.tolist() == [i ^ 32 for i in range(64)]


def test_a_guard_leaves_other_lanes_alone() -> None:
    out = np.arange(32, dtype=np.uint32)
    execute(
        """mov.b32 %r1, 5; setp.lt.u32 %p1, %r0, 4; @%p1 mov.b32 %r1, 6; @!%p1 add.s32 %r1, %r1, 10;
        st.global.b32 [%rd0], %r1;""",
        out,
    )
    assert out.tolist() == [6] * 4 + [15] * 28


def test_a_trap_is_an_error() -> None:
    execute("setp.gt.u32 %p1, %r0, 99; @%p1 trap;")
    with pytest.raises(PtxError, match="the program traps"):
        execute("setp.gt.u32 %p1, %r0, 9; @%p1 trap;")


def test_other_barriers_and_jumps_are_refused() -> None:
    for instruction in (
        "bar.sync 0, 64",
        "bar.arrive 0, 64",
        "bar.red.popc.u32 %r1, 0, %p1",
        "brx.idx %r1, T",
        "call f",
        "bra NOWHERE",
    ):
        with pytest.raises(PtxError, match="not known|not declared"):
            execute(f"{instruction};", threads=64)


def test_a_loop_without_an_end_is_an_error() -> None:
    with pytest.raises(PtxError, match="does not end"):
        execute("AGAIN: bra AGAIN;", most_steps=1000)
