"""Which random bits the instruction of Blackwell for stochastic rounding uses for which number. It is only reported.

``cvt.rs.satfinite.e2m1x4.f32`` rounds four numbers with one word of 32 random bits. crossgrain reads its manual so: the
number in the lowest bits of the result is rounded with the lowest byte, and so on. As long as no GPU has confirmed
that, kernels do not use the instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossgrain.formats import E2M1
from crossgrain.kernels.reference.elements import round_stochastically
from crossgrain.kernels.triton.launch import Launcher

from .finding import Finding

HAVE_IT = ((10, 0), (10, 3))
"""Compute capabilities that have the instruction."""

_BLOCK = 256


@triton.jit
def four_stochastic_kernel(x, random, out, BLOCK: tl.constexpr):
    """The codes of four numbers in the low 16 bits of an int32, the first in the lowest bits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.inline_asm_elementwise(
        """
        {
        .reg .b16 four, none;
        mov.b16 none, 0;
        cvt.rs.satfinite.e2m1x4.f32 four, {$4, $3, $2, $1}, $5;
        mov.b32 $0, {four, none};
        }
        """,
        "=r,f,f,f,f,r",
        [tl.load(x + 4 * at), tl.load(x + 4 * at + 1), tl.load(x + 4 * at + 2), tl.load(x + 4 * at + 3),
         tl.load(random + at)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )  # fmt: skip
    tl.store(out + at, codes)


def check_instruction(launcher: Launcher, device: torch.device, count: int = 1 << 16) -> Finding:
    """Round random numbers, and say which byte explains the rounding of which number, and which bits change it."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(count, 4, generator=generator) * 14 - 7).to(device)
    random = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator).to(device)
    codes = _codes(launcher, x, random)
    agreement = [[_share_explained(x, random, codes, place, byte) for byte in range(4)] for place in range(4)]
    changes = [[0.0] * 32 for _ in range(4)]
    for bit in range(32):
        flipped = random ^ torch.tensor(-(2**31) if bit == 31 else 1 << bit, dtype=torch.int32, device=device)
        different = _codes(launcher, x, flipped) != codes
        for place in range(4):
            changes[place][bit] = float(different[:, place].float().mean())
    found = Finding({"share_explained_by_byte": agreement, "share_changed_by_bit": changes})
    for place in range(4):
        if agreement[place][place] != 1.0:
            found.problems.append(
                f"number {place} is not rounded with byte {place}, which explains {agreement[place][place]:.4f} of it"
            )
    return found


def _codes(launcher: Launcher, x: Tensor, random: Tensor) -> Tensor:
    """The codes [count, 4] by the instruction."""
    out = torch.empty_like(random)
    given = {"x": x, "random": random, "out": out, "BLOCK": _BLOCK}
    launcher(four_stochastic_kernel, len(random) // _BLOCK, x.device, 4, given)
    return (out[:, None] >> torch.arange(0, 16, 4, dtype=torch.int32, device=x.device)) & 15


def _share_explained(x: Tensor, random: Tensor, codes: Tensor, place: int, byte: int) -> float:
    bytes_ = ((random >> (8 * byte)) & 0xFF).to(torch.uint8)
    expected = round_stochastically(x[:, place].contiguous(), E2M1, bytes_)
    return float((codes[:, place] == expected).float().mean())
