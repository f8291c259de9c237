"""Small kernels for tests of the emulator, written by hand."""

from typing import Any

import numpy as np

from . import Pointer, Report, run
from .values import Array

_DECLARATIONS = """
    .reg .pred %p<10>;
    .reg .b16 %rs<20>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<20>;
"""


def kernel(body: str, *, parameters: tuple[str, ...] = ("u64",) * 4, threads: int = 32) -> str:
    """A kernel with the registers %p, %rs, %r, %rd, and its parameters k_param_0 and so on."""
    list_of_parameters = ",\n".join(f"    .param .{kind} k_param_{i}" for i, kind in enumerate(parameters))
    return (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 global_smem[];\n"
        f".visible .entry k(\n{list_of_parameters}\n)\n.reqntid {threads}\n{{{_DECLARATIONS}{body}\n    ret;\n}}\n"
    )


def execute(
    body: str, *arguments: Array | Pointer | int | float | None, threads: int = 32, blocks: int = 1, shared: int = 0,
    **options: Any,
) -> Report:  # fmt: skip
    """Run instructions with arguments; pointers are in %rd0 and following, the number of the thread is in %r0.

    Pointers go to the thread's own number of their array: of its 1, 2, 4 or 8 bytes.
    """
    lines = ["mov.u32 %r0, %tid.x;"]
    for number, each in enumerate(arguments):
        if isinstance(each, np.ndarray):
            lines.append(f"ld.param.b64 %rd{number}, [k_param_{number}];")
            lines.append(f"mad.wide.u32 %rd{number}, %r0, {each.itemsize}, %rd{number};")
    kinds = tuple("u32" if isinstance(each, int | float) else "u64" for each in arguments)
    ptx = kernel("\n".join([*lines, body]), parameters=kinds, threads=threads)
    return run(ptx, (blocks,), arguments, shared, **options)


def evaluate(instruction: str, *sources: Array, result: type[np.generic], **options: Any) -> Array:
    """The result d of an instruction for many numbers a, b, c, e: ``evaluate("add.s32 d, a, b", x, y, result=...)``.

    A result of bool is that of a predicate.
    """
    names = "abcef"[: len(sources)]
    count = max(each.size for each in sources)
    padded = -(-count // 256) * 256
    held = [np.resize(each, padded) for each in sources]
    out = np.zeros(padded, np.uint16 if result is np.bool_ else result)
    lines = ["mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 256, %r1;"]
    for number, array in enumerate([*held, out]):
        lines.append(f"ld.param.b64 %rd{number}, [k_param_{number}];")
        lines.append(f"mad.wide.u32 %rd{number}, %r3, {array.itemsize}, %rd{number};")
    for number, (name, array) in enumerate(zip(names, held, strict=True)):
        bits = 8 * array.itemsize
        lines.append(f".reg .b{bits} {name}; ld.global.b{bits} {name}, [%rd{number}];")
    lines.append(f".reg {'.pred' if result is np.bool_ else f'.b{8 * out.itemsize}'} d; {instruction};")
    if result is np.bool_:
        lines.append("selp.b16 %rs1, 1, 0, d;")
    stored = "%rs1" if result is np.bool_ else "d"
    lines.append(f"st.global.b{8 * out.itemsize} [%rd{len(sources)}], {stored};")
    ptx = kernel("\n".join(lines), parameters=("u64",) * (len(sources) + 1), threads=256)
    run(ptx, (padded // 256,), [*held, out], 0, **options)
    return out[:count] != 0 if result is np.bool_ else out[:count]


def floats(*numbers: float) -> Array:
    """Numbers as the raw bits of float32."""
    return np.array(numbers, np.float32).view(np.uint32)


def patterns() -> Array:
    """Raw bits of float32: all upper halves, and many with lower ones that make ties, or lie just beside them."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([high, *(high[::5] | np.uint32(low) for low in (1, 0x0FFF, 0x1000, 0x8000, 0x8001, 0xFFFF))])
