"""Reading PTX: scopes, labels, operands, and what is refused."""

import numpy as np
import pytest

from . import PtxError, run
from .handwritten import execute, kernel
from .source import parse


def test_registers_of_inner_braces_hide_others() -> None:
    out = np.zeros(32, np.uint32)
    execute(
        """mov.b32 %r1, 1; .reg .b32 a; mov.b32 a, 1000000;
        { .reg .b32 a, t<3>; mov.b32 a, 10; mov.b32 t2, 20; add.s32 %r1, a, t2; }
        { .reg .b16 a; .reg .b32 b; mov.b16 a, 5; mov.b32 b, {a, a}; add.s32 %r1, %r1, b; }
        add.s32 %r1, %r1, a;
        st.global.b32 [%rd0], %r1;""",
        out,
    )
    assert set(out) == {30 + 0x50005 + 1000000}


def test_comments_lines_and_labels() -> None:
    text = """// a comment; with a semicolon
        .loc 1 2 3
        $L_1: /* bra */ mov.b32 %r1, 0; .pragma "nounroll";
        bra
            $L_1;"""
    program = parse(kernel(text))
    assert [each.opcode for each in program.instructions] == ["mov.b32", "bra", "ret"]
    assert program.labels == {"$L_1": 0} and program.threads == 32 and program.target == "sm_90a"


@pytest.mark.parametrize(
    "body, what",
    [
        ("mov.b32 %r99, 0;", "cannot go to"),
        ("mov.b32 unknown, 0;", "unknown is not declared"),
        ("add.s32 %r1, %rd1, 0;", "%rd1 has 64 bits, the instruction reads 32"),
        ("mov.b32 %rd1, 0;", "%rd1 has 64 bits, the instruction writes 32"),
        ("mov.b32 %r1, 0x1ffffffff;", "constant 0x1ffffffff is none of 32 bits"),
        ("mov.u32 %r1, %warpid;", "register %warpid is not known"),
        (".local .b8 stack[16];", "directive is not known"),
        (".reg .b128 %q<2>;", "registers of this kind are not known"),
        ("A: A: mov.b32 %r1, 0;", "label A is there twice"),
        ("frobnicate.b32 %r1, %r2;", "instruction frobnicate.b32 is not known: frobnicate.b32"),
        ("add.s32 %r1, %r0;", "1 operands instead of 2: add.s32 %r1, %r0"),
        ("prmt.b32.f4e %r1, %r0, %r0, 0;", "prmt.b32.f4e is not known"),
        ("mov.b32 %r1, {%rs1, %rs2, %rs3};", "do not fill"),
        ("@%r1 mov.b32 %r2, 0;", "%r1 is no predicate"),
        ("add.sat.s32 %r1, %r0, %r0;", "add.sat.s32 is not known"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_unknown_is_named(body: str, what: str) -> None:
    with pytest.raises(PtxError, match=what):
        execute(body)


def test_kernels_say_their_threads_and_are_alone() -> None:
    good = kernel("")
    for bad, what in (
        (good.replace(".reqntid 32", ""), "does not say how many threads"),
        (good.replace(".reqntid 32", ".reqntid 33"), "whole warps"),
        (good.replace(".reqntid 32", ".reqntid 32\n.reqnctapercluster 2"), "reqnctapercluster"),
        (good + good.replace("entry k", "entry other"), "2 kernels"),
        (good + ".func f() { ret; }", "functions are not known"),
        (good.replace(".param .u64 k_param_0", ".param .align 64 .b8 k_param_0[128]"), "parameter of this kind"),
    ):
        with pytest.raises(PtxError, match=what):
            run(bad, (1,), [], 0)
    with pytest.raises(PtxError, match="grid"):
        run(good, (0,), [], 0)


def test_a_program_ends_with_a_return() -> None:
    with pytest.raises(PtxError, match="ends without a return"):
        run(kernel("").replace("ret;", "mov.b32 %r1, 0;"), (1,), [], 0)
