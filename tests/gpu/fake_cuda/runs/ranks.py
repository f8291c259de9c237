"""What ranks do, with torch's fake process group: its collectives give each rank its own numbers back.

The results mean nothing, but are the same on both devices, and show where the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import crossgrain as cg
from crossgrain.distributed import TokenExchange
from crossgrain.nn.cross_entropy import parallel_cross_entropy

from .common import OPTIONS, WIDTH, Results, Run, Step, backward, gradient, numbers, of_parameters, trained
from .recipes import RECIPES

RANKS = 2


@contextmanager
def _ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def with_ranks(run: Callable[..., Step]) -> Callable[..., Step]:
    """The run with ranks, from when it prepares the model until its step has ended."""

    @wraps(run)
    def ranked(device: str, **options: Any) -> Step:
        with ExitStack() as stack:
            stack.enter_context(_ranks())
            step = run(device, **options)
            until = stack.pop_all()

        def step_and_end() -> Results:
            with until:
                return step()

        return step_and_end

    return ranked


@with_ranks
def _parallel(device: str, recipe: str, mode: str) -> Step:
    group = dist.group.WORLD
    layer = cg.Linear(
        WIDTH, 2 * WIDTH, parallel_mode=mode, tp_group=group, tp_size=RANKS, sequence_parallel=True, **OPTIONS
    )
    width = WIDTH if mode == "column" else WIDTH // RANKS
    return partial(trained, layer.to(device), numbers(device, 64, width), RECIPES[recipe]())


@with_ranks
def _reduced(device: str, recipe: str) -> Step:
    """Amaxes of delayed scaling are reduced over data-parallel ranks."""
    layer, x = cg.Linear(WIDTH, WIDTH, **OPTIONS).to(device), numbers(device, 32, WIDTH)

    def step() -> Results:
        for _ in range(2):
            with cg.autocast(recipe=RECIPES[recipe](), amax_reduction_group=dist.group.WORLD):
                y = layer(x)
            backward(y)
        return {"y": y.detach(), "dx": gradient(x)} | of_parameters(layer)

    return step


@with_ranks
def _context_parallel(device: str, how: str, layout: str) -> Step:
    packed = layout == "thd"
    attention = cg.DotProductAttention(
        4, 16, qkv_format=layout, attn_mask_type="padding_causal" if packed else "causal"
    ).to(device)
    attention.set_context_parallel_group(dist.group.WORLD, None, None, how)
    shape = (16, 4, 16) if packed else (16, 2, 4, 16)
    q, k, v = (numbers(device, *shape) for _ in range(3))
    starts = torch.tensor([0, 12, 32], dtype=torch.int32).to(device)
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 20, "max_seqlen_kv": 20} if packed else {}

    def step() -> Results:
        y = attention(q, k, v, **given)
        backward(y)
        return {"y": y.detach(), "dq": gradient(q), "dk": gradient(k), "dv": gradient(v)}

    return step


@with_ranks
def _exchanged(device: str) -> Step:
    layer = cg.GroupedLinear(2, WIDTH, WIDTH, **OPTIONS).to(device)
    x = numbers(device, 64, WIDTH)

    def step() -> Results:
        exchange = TokenExchange([32, 0, 16, 16])
        with cg.autocast(recipe=RECIPES["mxfp8"]()):
            rows = exchange.dispatch(x)
            y = exchange.combine(layer(rows, exchange.sizes))
        backward(y)
        return {"y": y.detach(), "dx": gradient(x)}

    return step


@with_ranks
def _cross_entropy(device: str) -> Step:
    logits = numbers(device, 8, 4, WIDTH)
    target = torch.randint(RANKS * WIDTH, (8, 4)).to(device)

    def step() -> Results:
        loss = parallel_cross_entropy(logits, target, 0.1, False, dist.group.WORLD)
        loss.sum().backward()
        return {"loss": loss.detach(), "dx": gradient(logits)}

    return step


RUNS: dict[str, Run] = {
    **{
        f"ranks {mode} {recipe}": partial(_parallel, recipe=recipe, mode=mode)
        for mode in ("column", "row")
        for recipe in ("fp8", "fp8_delayed", "mxfp8", "nvfp4", "hybrid")
    },
    "ranks reduced": partial(_reduced, recipe="fp8_delayed"),
    **{
        f"ranks context {how} {layout}": partial(_context_parallel, how=how, layout=layout)
        for how in ("all_gather", "a2a")  # "p2p" would read memory that the fake group has not filled
        for layout in ("sbhd", "thd")
    },
    "ranks exchange": _exchanged,
    "ranks cross entropy": _cross_entropy,
}
SHORT = ["ranks column hybrid", "ranks row fp8_delayed", "ranks reduced", "ranks context all_gather thd"]
SHORT += ["ranks context a2a sbhd", "ranks exchange", "ranks cross entropy"]
