"""shfl, redux, vote and matrices: lanes of a warp exchange numbers."""

import numpy as np
import pytest

from . import PtxError
from .handwritten import execute, floats
from .values import Array

_LANE = np.arange(64, dtype=np.uint32)


def _shuffled(instruction: str, source: Array = _LANE) -> Array:
    out = np.zeros(64, np.uint32)
    body = f"ld.global.b32 %r1, [%rd0]; {instruction}; st.global.b32 [%rd1], %r2;"
    execute(body, source.copy(), out, threads=64)
    return out


def test_a_butterfly_swaps_lanes_of_the_same_warp() -> None:
    for distance in (1, 2, 4, 8, 16, 31):
        assert np.array_equal(_shuffled(f"shfl.sync.bfly.b32 %r2, %r1, {distance}, 31, -1"), _LANE ^ distance)


def test_up_and_down_keep_lanes_at_the_edge() -> None:
    up = _shuffled("shfl.sync.up.b32 %r2, %r1, 3, 0, -1")
    assert np.array_equal(up, np.where(_LANE % 32 >= 3, _LANE - 3, _LANE))
    down = _shuffled("shfl.sync.down.b32 %r2, %r1, 5, 31, -1")
    assert np.array_equal(down, np.where(_LANE % 32 <= 26, _LANE + 5, _LANE))


def test_segments_of_a_warp() -> None:
    broadcast = _shuffled("shfl.sync.idx.b32 %r2, %r1, 0, 0x181f, -1")  # the first of each eight
    assert np.array_equal(broadcast, _LANE & ~np.uint32(7))
    up = _shuffled("shfl.sync.up.b32 %r2, %r1, 1, 0x1800, -1")
    assert np.array_equal(up, np.where(_LANE % 8 >= 1, _LANE - 1, _LANE))


def test_the_predicate_says_whether_the_lane_was_there() -> None:
    got = _shuffled("shfl.sync.up.b32 %r3|%p1, %r1, 3, 0, -1; selp.b32 %r2, 1, 0, %p1")
    assert np.array_equal(got, _LANE % 32 >= 3)


def test_a_mask_with_lanes_that_are_not_here_is_refused() -> None:
    body = "setp.lt.u32 %p1, %r0, 16; mov.u32 %r1, %r0; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, {};"
    execute(body.format("0xffff"))
    with pytest.raises(PtxError, match="names lanes that are not here.*shfl"):
        execute(body.format("-1"))
    with pytest.raises(PtxError, match="not in its own mask"):
        execute(body.format("0xff"))
    with pytest.raises(PtxError, match="shuffles from one that is not in its mask"):
        execute("mov.u32 %r1, %r0; setp.lt.u32 %p1, %r0, 3; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, 7;")


@pytest.mark.parametrize(
    "verb, want",
    [("add.u32", lambda x: x.sum(dtype=np.uint32)), ("min.s32", lambda x: x.view(np.int32).min().view(np.uint32)),
     ("max.u32", np.max), ("or.b32", np.bitwise_or.reduce), ("xor.b32", np.bitwise_xor.reduce)],
)  # fmt: skip
def test_reductions_of_integers(verb: str, want: object) -> None:
    source = np.random.default_rng(0).integers(0, 1 << 32, 64, dtype=np.uint32)
    got = _shuffled(f"redux.sync.{verb} %r2, %r1, -1", source)
    assert got.tolist() == [want(source[:32])] * 32 + [want(source[32:])] * 32  # type: ignore[operator]


def test_reductions_of_floats_skip_nans_and_order_zeros() -> None:
    source = np.zeros(64, np.float32)
    source[:32] = -0.0
    source[5], source[7], source[40] = np.nan, 0.0, -3.0
    raw = source.view(np.uint32)
    assert set(_shuffled("redux.sync.max.f32 %r2, %r1, -1", raw)) == {0}
    assert _shuffled("redux.sync.min.f32 %r2, %r1, -1", raw).tolist() == [1 << 31] * 32 + floats(-3.0).tolist() * 32
    assert _shuffled("redux.sync.max.abs.f32 %r2, %r1, -1", raw).tolist() == [0] * 32 + floats(3.0).tolist() * 32
    assert _shuffled("redux.sync.max.NaN.f32 %r2, %r1, -1", raw).tolist() == [0x7FFFFFFF] * 32 + [0] * 32
    everything = np.full(64, np.nan, np.float32).view(np.uint32)
    assert set(_shuffled("redux.sync.max.f32 %r2, %r1, -1", everything)) == {0x7FFFFFFF}


def test_a_reduction_of_a_part_of_the_warp() -> None:
    body = "setp.lt.u32 %p1, %r1, 4; mov.u32 %r2, 99; @%p1 redux.sync.add.u32 %r2, %r1, 15"
    assert _shuffled(body).tolist() == [6] * 4 + [99] * 60
    with pytest.raises(PtxError, match="names lanes that are not here"):
        _shuffled("setp.lt.u32 %p1, %r1, 4; @%p1 redux.sync.add.u32 %r2, %r1, 31")


def test_votes() -> None:
    even = "and.b32 %r3, %r1, 1; setp.eq.b32 %p1, %r3, 0;"
    assert set(_shuffled(even + "vote.sync.ballot.b32 %r2, %p1, -1")) == {0x55555555}
    for mode, want in {"any": 1, "all": 0, "uni": 0}.items():
        got = _shuffled(even + f"vote.sync.{mode}.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2")
        assert set(got) == {want}


def test_unknown_exchanges_are_refused() -> None:
    for instruction in (
        "shfl.bfly.b32 %r2, %r1, 1, 31", "shfl.sync.bfly.b64 %r2, %r1, 1, 31, -1", "redux.sync.add.f32 %r2, %r1, -1",
        "redux.sync.and.s32 %r2, %r1, -1", "vote.all.pred %p1, %p1", "activemask.b32 %r2",
        "match.any.sync.b32 %r2, %r1, -1",
    ):  # fmt: skip
        with pytest.raises(PtxError, match="not known"):
            execute(f"mov.u32 %r1, %r0; {instruction};")


_FILL = """
    mov.b32 %r20, global_smem; shl.b32 %r21, %r0, 4; add.s32 %r22, %r20, %r21;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd4]; st.shared.v4.b32 [%r22], {%r1, %r2, %r3, %r4}; bar.sync 0;
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_shared_memory(transposed: bool) -> None:
    """Four 8 x 8 matrices: lane l has two neighbours of row l / 4, or of column l / 4 if they are transposed."""
    matrices = np.random.default_rng(0).integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    out = np.zeros((32, 4), np.uint32)
    body = "ld.param.b64 %rd3, [k_param_0]; mad.wide.u32 %rd4, %r0, 16, %rd3;" + _FILL
    body += f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r22];"
    body += "ld.param.b64 %rd3, [k_param_1]; mad.wide.u32 %rd4, %r0, 16, %rd3;"
    body += "st.global.v4.b32 [%rd4], {%r5, %r6, %r7, %r8};"
    execute(body, matrices, out, shared=512)
    held = matrices.transpose(0, 2, 1) if transposed else matrices
    want = np.ascontiguousarray(held).reshape(4, 32, 2).transpose(1, 0, 2)
    assert np.array_equal(out.view(np.uint16).reshape(32, 4, 2), want)


def test_matrices_go_back_to_shared_memory() -> None:
    registers = np.random.default_rng(1).integers(0, 1 << 32, (32, 2), dtype=np.uint32)
    out = np.zeros((16, 8), np.uint16)
    execute(
        """ld.param.b64 %rd3, [k_param_0]; mad.wide.u32 %rd4, %r0, 8, %rd3; ld.global.v2.b32 {%r1, %r2}, [%rd4];
        mov.b32 %r20, global_smem; and.b32 %r23, %r0, 15; shl.b32 %r21, %r23, 4; add.s32 %r22, %r20, %r21;
        stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r22], {%r1, %r2};
        bar.sync 0; setp.lt.u32 %p1, %r0, 16; ld.param.b64 %rd3, [k_param_1]; mad.wide.u32 %rd4, %r0, 16, %rd3;
        @%p1 ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r22]; @%p1 st.global.v4.b32 [%rd4], {%r5, %r6, %r7, %r8};""",
        registers, out, shared=256,
    )  # fmt: skip
    assert np.array_equal(out.reshape(2, 32, 2), registers.view(np.uint16).reshape(32, 2, 2).transpose(1, 0, 2))


def test_matrices_need_whole_warps_and_rows_of_16_bytes() -> None:
    body = "mov.b32 %r20, global_smem; st.shared.b32 [%r20], 0; setp.lt.u32 %p1, %r0, 16; {} {{%r1}}, [{}];"
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16"
    with pytest.raises(PtxError, match="all lanes of a warp must come"):
        execute(body.format(f"@%p1 {load}", "%r20"), shared=256)
    with pytest.raises(PtxError, match="misaligned.*a multiple of 16 bytes"):
        execute(body.format(load, "%r20 + 8"), shared=256)
    for unknown in ("ldmatrix.sync.aligned.m16n16.x1.shared.b8", "ldmatrix.sync.aligned.m8n8.x2.shared.b16"):
        with pytest.raises(PtxError, match="matrix is not known"):
            execute(body.format(unknown, "%r20"), shared=256)
