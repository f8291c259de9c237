"""Global and shared memory: bounds, alignment, widths, parameters, atomics."""

from typing import Any

import numpy as np
import pytest

from . import Pointer, PtxError, run
from .handwritten import execute, kernel


def test_a_copy() -> None:
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    execute("ld.global.b32 %r1, [%rd0]; st.global.b32 [%rd1], %r1;", x, y, threads=64)
    assert np.array_equal(x, y)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_vectors(count: int) -> None:
    x, y = np.arange(32 * count, dtype=np.uint32), np.zeros(32 * count, np.uint32)
    names = ", ".join(f"%r{i + 1}" for i in range(count))
    places = "".join(
        f"ld.param.b64 %rd{i}, [k_param_{i}]; mad.wide.u32 %rd{i}, %r0, {4 * count}, %rd{i};" for i in range(2)
    )
    execute(f"{places} ld.global.v{count}.b32 {{{names}}}, [%rd0]; st.global.v{count}.b32 [%rd1], {{{names}}};", x, y)
    assert np.array_equal(x, y)


def test_an_access_behind_the_end_is_found() -> None:
    for count, offset in ((31, 0), (32, 4), (32, -4)):
        x = np.zeros(count, np.uint32)
        with pytest.raises(PtxError, match=r"(out of bounds: 4 bytes|access to no buffer).*ld.global"):
            execute(f"ld.global.b32 %r1, [%rd0 + {offset}];", x)


def test_buffers_do_not_touch_each_other() -> None:
    x, y = np.zeros(32, np.uint32), np.zeros(1 << 20, np.uint32)
    with pytest.raises(PtxError, match="out of bounds.*buffer 0, which has 128"):
        execute("ld.global.b32 %r1, [%rd0 + 4096];", x, y)
    with pytest.raises(PtxError, match="access to no buffer"):
        execute("mov.b64 %rd5, 4096; ld.global.b32 %r1, [%rd5];", x)


def test_a_null_pointer_is_no_buffer() -> None:
    with pytest.raises(PtxError, match="access to no buffer: address 0x0"):
        execute("ld.param.b64 %rd5, [k_param_1]; ld.global.b32 %r1, [%rd5];", np.zeros(32, np.uint32), None)


def test_misaligned_accesses_are_found() -> None:
    x = np.zeros(64, np.uint32)
    with pytest.raises(PtxError, match="misaligned access: 4 bytes at offset 2"):
        execute("ld.global.b32 %r1, [%rd0 + 2];", x)
    with pytest.raises(PtxError, match="misaligned access: 8 bytes at offset 4"):
        execute("ld.global.v2.b32 {%r1, %r2}, [%rd0];", x)


def test_a_pointer_into_a_buffer() -> None:
    x, y = np.arange(64, dtype=np.uint8), np.zeros(32, np.uint8)
    body = """ld.param.b64 %rd5, [k_param_0]; cvt.u64.u32 %rd6, %r0; add.s64 %rd5, %rd5, %rd6;
        ld.global.b8 %rs1, [%rd5]; st.global.b8 [%rd1], %rs1;"""
    execute(body, Pointer(x, 7), y)
    assert np.array_equal(y, x[7:39])
    with pytest.raises(PtxError, match="out of bounds"):
        execute(body, Pointer(x, 33), y)


def test_the_same_array_twice_is_one_buffer_and_overlapping_ones_are_refused() -> None:
    x = np.arange(64, dtype=np.uint32)
    execute("ld.global.b32 %r1, [%rd0]; add.s32 %r2, %r1, 1; st.global.b32 [%rd1], %r2;", x, x)
    assert np.array_equal(x[:32], np.arange(1, 33))
    with pytest.raises(PtxError, match="two buffers overlap"):
        execute("ret;", x, x[1:])
    with pytest.raises(PtxError, match="contiguous"):
        execute("ret;", x.reshape(8, 8).T)


def test_no_array_changes_if_the_kernel_fails() -> None:
    x = np.zeros(32, np.uint32)
    with pytest.raises(PtxError, match="out of bounds"):
        execute("st.global.b32 [%rd0], 7; ld.global.b32 %r1, [%rd0 + 4];", x)
    assert not x.any()


def test_a_read_only_array_may_not_be_written() -> None:
    x = np.zeros(32, np.uint32)
    x.setflags(write=False)
    execute("ld.global.b32 %r1, [%rd0];", x)
    with pytest.raises(PtxError, match="read-only"):
        execute("st.global.b32 [%rd0], 7;", x)


def test_scalars_are_checked_against_their_types() -> None:
    ptx = kernel(
        """ld.param.b32 %r1, [k_param_0]; ld.param.s32 %rd1, [k_param_0]; ld.param.b64 %rd2, [k_param_2];
        st.global.b32 [%rd2], %r1; st.global.b64 [%rd2 + 8], %rd1;
        ld.param.b32 %r2, [k_param_1]; st.global.b32 [%rd2 + 4], %r2;""",
        parameters=("u32", "f32", "u64", "u64"),
    )
    out = np.zeros(4, np.int32)
    run(ptx, (1,), [-5, 1.5, out], 0)  # the last pointer is scratch memory
    assert out[0] == -5 and out[1:2].view(np.float32)[0] == 1.5 and out[2:].view(np.int64)[0] == -5
    wrong: list[tuple[list[Any], str]] = [
        ([1 << 32, 1.5, out], "does not fit"),
        ([1, 1.5, out, out, out], "5 arguments"),
        ([1], "not all others are pointers"),
        ([out, 1.5, out], "cannot be a pointer"),
    ]
    for arguments, what in wrong:
        with pytest.raises(PtxError, match=what):
            run(ptx, (1,), arguments, 0)


def test_modifiers_of_caches_change_nothing_and_unknown_ones_are_refused() -> None:
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    execute(
        """createpolicy.fractional.L2::evict_last.b64 %rd6, 1.0;
        ld.global.ca.L1::evict_last.L2::cache_hint.b32 %r1, [%rd0], %rd6; st.global.cs.b32 [%rd1], %r1;""",
        x, y,
    )  # fmt: skip
    assert np.array_equal(x, y)
    for instruction in (
        "ld.b32 %r1, [%rd0]",
        "ld.global.nc.b32 %r1, [%rd0]",
        "ld.volatile.global.b32 %r1, [%rd0]",
        "ld.local.b32 %r1, [%rd0]",
        "ld.global.v3.b32 {%r1, %r2, %r3}, [%rd0]",
        "ld.global.v2.b32 {%r1}, [%rd0]",
        "st.global.relaxed.gpu.b32 [%rd0], %r1",
        "ld.global.b32 %rs1, [%rd0]",
        "ld.global.b32.unified %r1, [%rd0]",
        "ld.global.L2::cache_hint.b32 %r1, [%rd0]",
        "cp.async.ca.shared.global [%r1], [%rd0], 4",
    ):
        with pytest.raises(PtxError, match=r"(not known|must be|registers for|has 16 bits)"):
            execute(f"{instruction};", x)


def test_shared_memory_ends_where_it_ends() -> None:
    body = "mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; st.shared.b32 [%r3 + {}], %r0;"
    execute(body.format(0), shared=128)
    for offset, shared in ((0, 124), (4, 128), (-4, 128)):
        with pytest.raises(PtxError, match="out of bounds.*shared memory, which has"):
            execute(body.format(offset), shared=shared)
    with pytest.raises(PtxError, match="misaligned"):
        execute(body.format(2), shared=256)


def test_shared_memory_that_nobody_wrote_is_not_read() -> None:
    body = "mov.b32 %r1, global_smem; {} bar.sync 0; ld.shared.b32 %r2, [%r1 + 4];"
    execute(body.format("st.shared.b64 [%r1], 5;"), shared=8)
    with pytest.raises(PtxError, match="read that nobody wrote"):
        execute(body.format("st.shared.b32 [%r1], 5;"), shared=8)


def test_blocks_have_their_own_shared_memory() -> None:
    out = np.zeros(4, np.uint32)
    execute(
        """mov.b32 %r1, global_smem; mov.u32 %r2, %ctaid.x; setp.eq.b32 %p1, %r0, 0; @%p1 st.shared.b32 [%r1], %r2;
        bar.sync 0; ld.shared.b32 %r3, [%r1]; ld.param.b64 %rd5, [k_param_0]; mad.wide.u32 %rd5, %r2, 4, %rd5;
        st.global.b32 [%rd5], %r3;""",
        out, blocks=4, shared=4,
    )  # fmt: skip
    assert out.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "change, start, want",
    [("add.u32", 10, 10 + 992), ("max.s32", 5, 31), ("max.u32", 5, 31), ("min.s32", 5, 0), ("or.b32", 64, 95)],
)
def test_atomics_are_done_for_every_thread(change: str, start: int, want: int) -> None:
    for verb, to in (("atom", "%r9, "), ("red", "")):
        out = np.full(1, start, np.uint32)
        execute(f"ld.param.b64 %rd5, [k_param_0]; {verb}.global.gpu.relaxed.{change} {to}[%rd5], %r0;", out, blocks=2)
        assert out[0] == want


def test_what_an_atomic_returns_depends_on_the_order_and_is_not_used() -> None:
    out = np.zeros(32, np.uint32)
    body = "ld.param.b64 %rd5, [k_param_0]; atom.global.gpu.relaxed.add.u32 %r9, [%rd5], 1;"
    execute(body, out)
    with pytest.raises(PtxError, match="an undefined value is stored"):
        execute(body + "st.global.b32 [%rd1], %r9;", out, out.copy())


def test_atomics_whose_result_is_open_are_refused() -> None:
    out = np.zeros(32, np.uint32)
    for instruction in (
        "atom.global.gpu.relaxed.add.f32 %r9, [%rd0], %r0", "atom.global.gpu.relaxed.exch.b32 %r9, [%rd0], %r0",
        "atom.global.gpu.relaxed.cas.b32 %r9, [%rd0], %r0, %r0", "red.add.u32 [%rd0], %r0",
        "red.shared.gpu.relaxed.add.u32 [%r1], 1",
    ):  # fmt: skip
        with pytest.raises(PtxError, match="not known|must be said|depends on the order of threads"):
            execute(f"{instruction};", out)
