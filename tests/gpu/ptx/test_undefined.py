"""Undefined values: they may be moved about, but not decide anything."""

import numpy as np
import pytest

from . import PtxError
from .handwritten import execute
from .values import Array

_HALF = "mov.b16 %rs1, 0x1234; mov.b32 %r8, {%rs1, %rs2};"


def _run(body: str) -> Array:
    out = np.zeros(32, np.uint32)
    execute(body, out)
    return out


@pytest.mark.parametrize(
    "body, what",
    [
        ("st.global.b32 [%rd0], %r9;", "an undefined value is stored"),
        ("add.s32 %r8, %r9, 1; st.global.b32 [%rd0], %r8;", "an undefined value is stored"),
        ("mov.b32 %r8, %r9; st.global.b32 [%rd0], %r8;", "an undefined value is stored"),
        ("ld.global.b32 %r8, [%rd9];", "the address is undefined"),
        ("setp.eq.b32 %p1, %r9, 0;", "an undefined value decides a predicate"),
        ("@%p1 st.global.b32 [%rd0], 1;", "predicate %p1 is undefined"),
        ("selp.b32 %r8, 1, 2, %p1;", "predicate %p1 is undefined"),
        ("and.pred %p2, %p1, %p1;", "predicate %p1 is undefined"),
        ("shfl.sync.bfly.b32 %r8, %r9, 1, 31, -1; st.global.b32 [%rd0], %r8;", "an undefined value is stored"),
        ("redux.sync.add.u32 %r8, %r9, -1; st.global.b32 [%rd0], %r8;", "an undefined value is stored"),
        ("red.global.gpu.relaxed.add.u32 [%rd0], %r9;", "an undefined value is stored"),
        ("shfl.sync.bfly.b32 %r8, %r0, %r9, 31, -1;", "decides which lanes exchange"),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 mov.b32 %r8, 1; st.global.b32 [%rd0], %r8;", "an undefined value is stored"),
        ("mov.b32 %r8, {%rs1, %rs2}; st.global.b32 [%rd0], %r8;", "an undefined value is stored"),
        (_HALF + "shr.u32 %r7, %r8, 8; st.global.b32 [%rd0], %r7;", "an undefined value is stored"),
        (_HALF + "add.s32 %r7, %r8, 1; and.b32 %r6, %r7, 255; st.global.b32 [%rd0], %r6;", "value is stored"),
    ],
)  # fmt: skip
def test_undefined_values_do_not_reach_memory_addresses_or_predicates(body: str, what: str) -> None:
    with pytest.raises(PtxError, match=what):
        _run(body)


@pytest.mark.parametrize(
    "body, want",
    [
        ("mov.b32 {%rs3, %rs4}, %r8; cvt.u32.u16 %r7, %rs3;", 0x1234),
        ("and.b32 %r7, %r8, 0xffff;", 0x1234),
        ("or.b32 %r7, %r8, 0xffff0000;", 0xFFFF1234),
        ("shl.b32 %r7, %r8, 16;", 0x12340000),
        ("prmt.b32 %r7, %r8, %r8, 0x1010;", 0x12341234),
        ("bfe.u32 %r7, %r8, 4, 8;", 0x23),
        ("cvt.u32.u16 %r7, %r8;", 0x1234),
        ("abs.bf16x2 %r6, %r8; and.b32 %r7, %r6, 65535;", 0x1234),
        ("setp.lt.u32 %p1, %r0, 99; selp.b32 %r7, 5, %r9, %p1;", 5),
        ("xor.b32 %r6, %r8, 1; and.b32 %r7, %r6, 255;", 0x35),
    ],
)
def test_half_of_a_pair_may_be_undefined(body: str, want: int) -> None:
    out = np.zeros(32, np.uint32)
    report = execute(f"{_HALF} {body} st.global.b32 [%rd0], %r7;", out)
    assert set(out) == {want}
    assert report.undefined["%rs2"] == 1


def test_a_conversion_of_a_pair_may_have_one_undefined() -> None:
    body = """mov.b32 %r1, 0f3F800000; cvt.rn.satfinite.e4m3x2.f32 %rs1, {};
        cvt.u32.u8 %r7, %rs1; st.global.b32 [%rd0], %r7;"""
    assert set(_run(body.format("%r9, %r1"))) == {0x38}
    with pytest.raises(PtxError, match="an undefined value is stored"):
        _run(body.format("%r1, %r9"))


def test_undefined_bytes_go_through_shared_memory() -> None:
    body = """mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;
        mov.b16 %rs1, 7; mov.b32 %r8, {{%rs1, %rs2}};
        st.shared.b32 [%r3], %r8; ld.shared.b16 %rs5, [%r3 + {}]; cvt.u32.u16 %r7, %rs5; st.global.b32 [%rd0], %r7;"""
    out = np.zeros(32, np.uint32)
    execute(body.format(0), out, shared=128)
    assert set(out) == {7}
    with pytest.raises(PtxError, match="an undefined value is stored"):
        execute(body.format(2), out, shared=128)


@pytest.mark.parametrize("leaves_early", ["", "setp.eq.b32 %p2, %r0, 3; @%p2 bra DONE;"])
def test_registers_of_inner_braces_are_new_each_time(leaves_early: str) -> None:
    """The first pass writes the register, the second only reads it."""
    body = f"""mov.b32 %r1, 0; mov.b32 %r2, 0;
        AGAIN: {{ .reg .b32 t, u; setp.ne.b32 %p1, %r1, 0; mov.b32 u, 1; @%p1 bra SKIP; mov.b32 t, 5; SKIP: <> }}
        {leaves_early}
        add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 2; @%p1 bra AGAIN;
        DONE: st.global.b32 [%rd0], %r2;"""
    assert set(_run(body.replace("<>", "add.s32 %r2, %r2, u;"))) <= {1, 2}
    with pytest.raises(PtxError, match="an undefined value is stored"):
        _run(body.replace("<>", "add.s32 %r2, %r2, t;"))
