"""Races in shared and global memory: each kind is found, and what is in order is not."""

import numpy as np
import pytest

from . import PtxError
from .handwritten import execute

# %r3: the thread's own place in shared memory; %r4: that of the thread as far from the other end.
_PLACES = """
    mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;
    mov.u32 %r5, %ntid.x; sub.s32 %r6, %r5, %r0; shl.b32 %r7, %r6, 2; add.s32 %r8, %r1, %r7; sub.s32 %r4, %r8, 4;
"""


def _run(body: str, threads: int) -> None:
    execute(_PLACES + body, threads=threads, shared=4 * threads)


@pytest.mark.parametrize("threads", [32, 64])
@pytest.mark.parametrize(
    "first, second, race",
    [
        ("st.shared.b32 [%r3], %r0", "ld.shared.b32 %r10, [%r4]", "is read, and written by"),
        ("st.shared.b32 [%r3], %r0", "st.shared.b32 [%r4], %r0", "is written, and written by"),
        ("ld.shared.b32 %r10, [%r4]", "st.shared.b32 [%r3], 7", "is written, and read or left alone by"),
    ],
)
def test_what_two_threads_do_needs_a_barrier_between(first: str, second: str, race: str, threads: int) -> None:
    before = "st.shared.b32 [%r3], 1; bar.sync 0;"
    _run(f"{before} {first}; bar.sync 0; {second};", threads)
    with pytest.raises(PtxError, match=f"race: byte .* of shared memory {race}.*without a barrier.*{second[:9]}"):
        _run(f"{before} {first}; {second};", threads)


def test_a_barrier_of_the_warp_orders_its_lanes_alone() -> None:
    body = "st.shared.b32 [%r3], %r0; bar.warp.sync -1; ld.shared.b32 %r10, [%r4];"
    _run(body, 32)
    with pytest.raises(PtxError, match="race"):
        _run(body, 64)
    with pytest.raises(PtxError, match="a barrier of a part of a warp is not known"):
        _run("setp.lt.u32 %p1, %r0, 16; @%p1 bar.warp.sync 0xffff;", 32)


def test_shuffles_order_nothing() -> None:
    with pytest.raises(PtxError, match="race"):
        _run("st.shared.b32 [%r3], %r0; shfl.sync.bfly.b32 %r9, %r0, 1, 31, -1; ld.shared.b32 %r10, [%r4];", 32)


@pytest.mark.parametrize("threads, writer", [(32, 0), (32, 31), (64, 0), (64, 63)])
def test_a_write_after_many_reads_needs_a_barrier(threads: int, writer: int) -> None:
    """All threads read the same, and the first or the last of them writes."""
    body = f"""setp.eq.b32 %p1, %r0, {writer}; @%p1 st.shared.b32 [%r1], 5; bar.sync 0; ld.shared.b32 %r9, [%r1];
        <> @%p1 st.shared.b32 [%r1], 6;"""
    _run(body.replace("<>", "bar.sync 0;"), threads)
    with pytest.raises(PtxError, match="is written, and read or left alone by"):
        _run(body.replace("<>", ""), threads)


def test_reads_one_after_the_other_are_all_remembered() -> None:
    body = """setp.eq.b32 %p1, %r0, 3; setp.eq.b32 %p2, %r0, 40; @%p1 st.shared.b32 [%r1], 5; bar.sync 0;
        @%p1 ld.shared.b32 %r9, [%r1]; @%p2 ld.shared.b32 %r9, [%r1]; {} @%p2 st.shared.b32 [%r1], 6;"""
    _run(body.format("bar.sync 0;"), 64)
    with pytest.raises(PtxError, match="is written, and read or left alone by"):
        _run(body.format(""), 64)


def test_the_same_number_may_be_written_by_all() -> None:
    _run("st.shared.b32 [%r1], 5; bar.sync 0; ld.shared.b32 %r9, [%r1];", 64)
    with pytest.raises(PtxError, match="different numbers to byte 0 of shared memory"):
        _run("st.shared.b32 [%r1], %r0;", 64)


@pytest.mark.parametrize("first, second", [("0", "1"), ("1", "0")])
def test_a_write_of_what_was_there_races_with_that_of_another_number(first: str, second: str) -> None:
    """Zero is there. It does not matter which of the two writes comes first in the program."""
    choose = "setp.eq.b32 %p1, %r0, 0; setp.eq.b32 %p2, %r0, 40;"
    body = f"{choose} st.shared.b32 [%r1], 0; bar.sync 0;"
    body += f"@%p1 st.shared.b32 [%r1], {first}; @%p2 st.shared.b32 [%r1], {second};"
    with pytest.raises(PtxError, match="is written, and (written|read or left alone) by"):
        _run(body, 64)
    ours = "setp.eq.b32 %p1, %r2, 0; setp.eq.b32 %p2, %r2, 1;"
    body = f"{_MINE} {ours} @%p1 st.global.b32 [%rd0], {first}; @%p2 st.global.b32 [%rd0], {second};"
    with pytest.raises(PtxError, match="is written, and (written|read or left alone) by"):
        execute(body, np.zeros(32, np.uint32), blocks=2)


def test_a_thread_reads_what_it_wrote() -> None:
    _run("st.shared.b32 [%r3], %r0; ld.shared.b32 %r9, [%r3]; st.shared.b32 [%r3], %r9;", 64)


def test_a_part_of_a_number_is_enough() -> None:
    with pytest.raises(PtxError, match="race"):
        _run("st.shared.b32 [%r3], %r0; xor.b32 %r9, %r3, 4; ld.shared.b8 %rs1, [%r9 + 3];", 32)


_MINE = "mov.u32 %r2, %ctaid.x; ld.param.b64 %rd5, [k_param_0];"


def test_blocks_may_not_write_different_numbers_to_the_same_place() -> None:
    out = np.zeros(32, np.uint32)
    execute(_MINE + "st.global.b32 [%rd0], 7;", out, blocks=3)
    assert set(out) == {7}
    with pytest.raises(PtxError, match="different numbers to byte 0 of buffer 0"):
        execute(_MINE + "add.s32 %r3, %r2, 1; st.global.b32 [%rd0], %r3;", out * 0, blocks=3)
    later = "setp.eq.b32 %p1, %r2, 0; @%p1 st.global.b32 [%rd0], 5; @!%p1 st.global.b32 [%rd0], 6;"
    with pytest.raises(PtxError, match="race: byte 0 of buffer 0 is written, and written by.*block 1.*block 0"):
        execute(_MINE + later, out * 0, blocks=2)


def test_a_block_may_not_read_what_another_writes() -> None:
    read_first = _MINE + "setp.eq.b32 %p1, %r2, 0; @%p1 ld.global.b32 %r4, [%rd0]; @!%p1 st.global.b32 [%rd0], 9;"
    write_first = _MINE + "setp.eq.b32 %p1, %r2, 0; @%p1 st.global.b32 [%rd0], 9; @!%p1 ld.global.b32 %r4, [%rd0];"
    for between in ("@!%p1", "bar.sync 0; @!%p1"):  # a barrier is one of a block
        with pytest.raises(PtxError, match="is written, and read or left alone by"):
            execute(read_first.replace("@!%p1", between), np.zeros(32, np.uint32), blocks=2)
    with pytest.raises(PtxError, match="is read, and written by"):
        execute(write_first, np.zeros(32, np.uint32), blocks=2)


def test_blocks_of_different_waves_are_compared() -> None:
    """More blocks than run at once: the first and the last meet in one byte."""
    blocks = 1200
    body = f"""setp.eq.b32 %p1, %r2, 0; setp.eq.b32 %p2, %r2, {blocks - 1};
        @%p1 ld.global.b32 %r4, [%rd0]; @%p2 st.global.b32 [%rd0], 9;"""
    with pytest.raises(PtxError, match=f"is written, and read or left alone by.*block {blocks - 1}.*block 0"):
        execute(_MINE + body, np.zeros(32, np.uint32), blocks=blocks)


def test_global_memory_in_a_block_needs_a_barrier_as_well() -> None:
    body = """xor.b32 %r3, %r0, 32; ld.param.b64 %rd5, [k_param_0]; mad.wide.u32 %rd6, %r3, 4, %rd5;
        st.global.b32 [%rd0], 3; {} ld.global.b32 %r4, [%rd6];"""
    execute(body.format("bar.sync 0;"), np.zeros(64, np.uint32), threads=64)
    with pytest.raises(PtxError, match="is read, and written by"):
        execute(body.format(""), np.zeros(64, np.uint32), threads=64)


def test_atomics_race_with_plain_accesses_and_not_with_each_other() -> None:
    add = "red.global.gpu.relaxed.add.u32 [%rd5], 1;"
    execute(_MINE + add, np.zeros(1, np.uint32), blocks=2)
    with pytest.raises(PtxError, match="is read, and changed atomically by"):
        execute(_MINE + add + "ld.global.b32 %r4, [%rd5];", np.zeros(1, np.uint32), blocks=2)
    with pytest.raises(PtxError, match="is changed atomically, and read or left alone by"):
        execute(_MINE + "ld.global.b32 %r4, [%rd5];" + add, np.zeros(1, np.uint32), blocks=2)
    with pytest.raises(PtxError, match="is written, and changed atomically by"):
        execute(_MINE + add + "st.global.b32 [%rd5], 77;", np.zeros(1, np.uint32))
    with pytest.raises(PtxError, match="is written, and changed atomically by"):
        execute(_MINE + add + "st.global.b32 [%rd5], 32;", np.zeros(1, np.uint32))  # what is there by now
    with pytest.raises(PtxError, match="is changed atomically, and written by"):
        execute(_MINE + "setp.eq.b32 %p1, %r0, 0; @%p1 st.global.b32 [%rd5], 77;" + add, np.zeros(1, np.uint32))


def test_races_may_be_listed_instead() -> None:
    out = np.zeros(32, np.uint32)
    body = "st.shared.b32 [%r3], %r0; ld.shared.b32 %r10, [%r4]; ld.shared.b32 %r11, [%r4]; st.global.b32 [%rd0], %r10;"
    report = execute(_PLACES + body, out, shared=128, raise_races=False)
    assert len(report.races) == 2 and all("is read, and written by" in each for each in report.races)
    assert out.tolist() == list(range(31, -1, -1))
