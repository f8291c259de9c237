"""setp, set and selp."""

import ml_dtypes
import numpy as np
import pytest

from . import PtxError
from .handwritten import evaluate, execute, floats
from .values import of_type

_FLOATS = {
    "eq": [0, 1, 0, 0], "ne": [1, 0, 1, 0], "lt": [1, 0, 0, 0], "le": [1, 1, 0, 0], "gt": [0, 0, 1, 0],
    "ge": [0, 1, 1, 0], "equ": [0, 1, 0, 1], "neu": [1, 0, 1, 1], "ltu": [1, 0, 0, 1], "leu": [1, 1, 0, 1],
    "gtu": [0, 0, 1, 1], "geu": [0, 1, 1, 1], "num": [1, 1, 1, 0], "nan": [0, 0, 0, 1],
}  # fmt: skip


@pytest.mark.parametrize("verb", list(_FLOATS))
def test_floats_less_equal_greater_and_not_a_number(verb: str) -> None:
    a, b = np.array([1, 0, 2, np.nan], np.float32), np.array([2, -0.0, 1, 1], np.float32)
    want = [bool(each) for each in _FLOATS[verb]]
    assert evaluate(f"setp.{verb}.f32 d, a, b", a, b, result=np.bool_).tolist() == want
    assert (
        evaluate(f"setp.{verb}.f64 d, a, b", a.astype(np.float64), b.astype(np.float64), result=np.bool_).tolist()
        == want
    )
    for name, dtype in {"f16": np.float16, "bf16": ml_dtypes.bfloat16}.items():
        narrow = [each.astype(dtype).view(np.uint16) for each in (a, b)]
        assert evaluate(f"setp.{verb}.{name} d, a, b", *narrow, result=np.bool_).tolist() == want


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_integers(bits: int) -> None:
    a = np.array([0, 1, (1 << bits) - 1, 1 << (bits - 1)], np.uint64).astype(of_type(f"u{bits}"))
    x, y = np.repeat(a, 4), np.tile(a, 4)
    meaning = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for kind in "su":
        dtype = of_type(f"{kind}{bits}")
        for verb, ufunc in meaning.items():
            got = evaluate(f"setp.{verb}.{kind}{bits} d, a, b", x, y, result=np.bool_)
            assert np.array_equal(got, ufunc(x.view(dtype), y.view(dtype)))
    for verb, order in {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.items():
        got = evaluate(f"setp.{verb}.u{bits} d, a, b", x, y, result=np.bool_)
        assert np.array_equal(got, meaning[order](x, y))
    assert np.array_equal(evaluate(f"setp.eq.b{bits} d, a, b", x, y, result=np.bool_), x == y)
    assert np.array_equal(evaluate(f"setp.ne.b{bits} d, a, b", x, y, result=np.bool_), x != y)


def test_a_pair_of_numbers_has_two_predicates() -> None:
    a = np.array([1.0, 5.0] * 32, np.float16).view(np.uint32)
    b = np.array([2.0, 3.0] * 32, np.float16).view(np.uint32)
    out = np.zeros(32, np.uint32)
    execute(
        """ld.global.b32 %r1, [%rd0]; ld.global.b32 %r2, [%rd1];
        setp.lt.f16x2 %p1|%p2, %r1, %r2;
        selp.b32 %r3, 1, 0, %p1; selp.b32 %r4, 2, 0, %p2; or.b32 %r5, %r3, %r4;
        st.global.b32 [%rd2], %r5;""",
        a, b, out,
    )  # fmt: skip
    assert set(out) == {1}
    ones = evaluate("set.nan.f16x2.f16x2 d, a, a", np.array([0x7E003C00], np.uint32), result=np.uint32)
    assert ones[0] == 0x3C000000


def test_selp_takes_the_first_where_true() -> None:
    got = evaluate("setp.lt.f32 %p1, a, b; selp.f32 d, a, b, %p1", floats(1, 4), floats(2, 3), result=np.float32)
    assert got.tolist() == [1, 3]


def test_unknown_comparisons_are_refused() -> None:
    for instruction in (
        "setp.lo.s32 d, a, a",
        "setp.lt.b32 d, a, a",
        "setp.lt.and.s32 d, a, a",
        "setp.eq.ftz.f32 d, a, a",
    ):
        with pytest.raises(PtxError, match="not known|leaves open"):
            evaluate(instruction, floats(1), result=np.bool_)
