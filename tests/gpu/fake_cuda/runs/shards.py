"""FSDP2 on the emulated device: gathered weights, their gradients, and the optimizer on shards. See `ranks`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import crossgrain as cg
from crossgrain.distributed import gather_by_pass, gather_quantized

from .common import DTYPE, OPTIONS, WIDTH, Results, Run, Step, backward, gradient, numbers
from .ranks import RANKS, with_ranks
from .recipes import RECIPES


@with_ranks
def _sharded(device: str, recipe: str, how: str) -> Step:
    """FSDP2: weights that are kept quantized, converted ones that travel quantized, or by pass."""
    model = _two_layers(recipe, kept=how != "converted").to(device)
    if how == "converted":
        cg.convert(model, RECIPES[recipe]())
        gather_quantized(model)
    mesh = init_device_mesh(device, (RANKS,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    if how == "by pass":
        gather_by_pass(model)
    optimizer = cg.optim.FusedAdam(model.parameters(), master_weights=True)
    x = numbers(device, 64, WIDTH)

    def step() -> Results:
        for _ in range(2):
            with nullcontext() if how == "converted" else cg.autocast(recipe=RECIPES[recipe]()):
                y = model(x)
            backward(y)
            optimizer.step()
            optimizer.zero_grad()
        return {"y": y.detach(), "dx": gradient(x)}

    return step


def _two_layers(recipe: str, kept: bool) -> Any:
    if not kept:
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(DTYPE)
    with cg.quantized_model_init(recipe=RECIPES[recipe]()):
        return nn.Sequential(cg.Linear(WIDTH, 2 * WIDTH, **OPTIONS), nn.GELU(), cg.Linear(2 * WIDTH, WIDTH, **OPTIONS))


RUNS: dict[str, Run] = {
    f"shards {how} {recipe}": partial(_sharded, recipe=recipe, how=how)
    for how in ("kept", "by pass", "converted")
    for recipe in ("fp8", "mxfp8", "nvfp4", "hybrid")
}
SHORT = ["shards kept fp8", "shards by pass hybrid", "shards converted hybrid"]
