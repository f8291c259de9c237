"""Modules with several weights, or with norms before them, in shards of both kinds."""

import torch

import crossgrain as cg
from crossgrain.distributed import gather_by_pass, gather_quantized

from ..common.ranks import digest, fully_shard, mesh_of, run

MODULES = {
    "LayerNormLinear": lambda: cg.LayerNormLinear(64, 128),
    "LayerNormMLP": lambda: cg.LayerNormMLP(64, 128, activation="swiglu"),
    "GroupedLinear": lambda: cg.GroupedLinear(2, 64, 128),
    "TransformerLayer": lambda: cg.TransformerLayer(
        64, 128, 2, attention_dropout=0.0, hidden_dropout=0.0, fuse_qkv_params=True
    ),
}
ARGUMENTS = {"GroupedLinear": ([32, 64],)}
RECIPE = "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4"


def trained(name, quantized, mesh=None):
    """Losses of three steps, and a hash of what the module computes with."""
    torch.manual_seed(0)
    with cg.quantized_model_init(enabled=quantized, recipe=RECIPE if quantized else None):
        module = MODULES[name]()
    if mesh is not None:
        if not quantized:
            assert not gather_quantized(module, RECIPE).left
        gather_by_pass(fully_shard(module, mesh=mesh, reshard_after_forward=True))
    optimizer = cg.optim.FusedSGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for seed in range(3):
        x = torch.randn(96, 1, 64, generator=torch.Generator().manual_seed(seed))
        with cg.autocast(recipe=RECIPE):
            loss = module(x, *ARGUMENTS.get(name, ())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, digest(module) if quantized else None


def _in_shards(rank):
    mesh = mesh_of(2)
    return {(name, quantized): trained(name, quantized, mesh) for name in MODULES for quantized in (True, False)}


def test_modules_of_linear_layers(tmp_path):
    alone = {(name, quantized): trained(name, quantized) for name in MODULES for quantized in (True, False)}
    for found in run(_in_shards, 2, tmp_path):
        for case, result in alone.items():
            assert found[case] == result, case
