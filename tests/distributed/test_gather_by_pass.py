"""Rows in forward, columns in backward: how many bytes travel, and that nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain.distributed import count_gathered_bytes, gather_by_pass, gather_quantized

from .ranks import bind, converted_model, digest, error_of, high_precision, mesh_of, quantized_model, run, shard, train

RECIPES = ("mxfp8-fwd-nvfp4-bwd", "mxfp8", "nvfp4", "fp8", "mxfp8-fwd-hp-bwd")


def _trained(rank, ranks):
    found = {}
    for recipe in RECIPES:
        kept, converted = quantized_model(recipe), converted_model(recipe, hidden=90)
        gather_quantized(converted)
        for model in (kept, converted):
            shard(model, mesh_of(ranks))
            gather_by_pass(model)
        masters = cg.optim.FusedAdam(kept.parameters(), lr=1e-2, master_weights=True)
        adamw = torch.optim.AdamW(converted.parameters(), lr=1e-2)
        found[recipe] = (
            (train(kept, masters), digest(kept)),
            (train(converted, adamw), high_precision(converted)),
        )
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_is_what_it_was(tmp_path, ranks):
    alone = {}
    for recipe in RECIPES:
        kept, converted = quantized_model(recipe), converted_model(recipe, hidden=90)
        masters = cg.optim.FusedAdam(kept.parameters(), lr=1e-2, master_weights=True)
        adamw = torch.optim.AdamW(converted.parameters(), lr=1e-2)
        alone[recipe] = (
            (train(kept, masters), digest(kept)),
            (train(converted, adamw), high_precision(converted)),
        )
    for found in run(_trained, ranks, tmp_path, ranks):
        for recipe in RECIPES:
            assert found[recipe][0] == alone[recipe][0], recipe
            assert found[recipe][1][0] == alone[recipe][1][0], recipe
            for name, value in alone[recipe][1][1].items():
                assert torch.equal(found[recipe][1][1][name], value), (recipe, name)


class Wire:
    """Bytes of every collective that this process takes part in, by the size of what arrives."""

    def __init__(self):
        self.sizes = {}
        for name in ("all_gather_single", "all_gather", "all_reduce"):
            original = getattr(dist, name)
            setattr(dist, name, self._counting(name, original))

    def _counting(self, name, original):
        def counted(first, *args, **kwargs):
            tensors = first if isinstance(first, list) else [first]
            self.sizes.setdefault(name, []).append(sum(t.numel() * t.element_size() for t in tensors))
            return original(first, *args, **kwargs)

        return counted


def _bytes_per_parameter(rank, recipe, kind, by_pass):
    """Of a forward and of a backward pass, after a first step."""
    if kind == "quantized":
        with cg.quantized_model_init(recipe=recipe):
            layer = cg.Linear(256, 512, bias=False)
        bind(layer, recipe)
    else:
        layer = nn.Linear(256, 512, bias=False)
        if kind == "converted":
            cg.convert(layer, recipe)
            gather_quantized(layer)
        else:
            layer.to(torch.bfloat16)
    model = fully_shard(layer, mesh=mesh_of(2), reshard_after_forward=True)
    if by_pass:
        gather_by_pass(model)
    x = torch.randn(32, 256, dtype=layer.weight.dtype, requires_grad=True)
    model(x).sum().backward()
    count, wire = count_gathered_bytes(model), Wire()
    y = model(x).sum()
    forward = count.total
    y.backward()
    return [size / (256 * 512) for size in (forward, count.total - forward)], wire.sizes, count.sizes


@pytest.mark.parametrize("kind", ["quantized", "converted"])
def test_bytes_per_parameter_and_step(tmp_path, kind):
    """MXFP8 rows are 1 + 1/32 bytes, NVFP4 columns 1/2 + 1/16; bf16 takes 2 in each pass."""
    recipe = "mxfp8-fwd-nvfp4-bwd"
    for (forward, backward), wire, counted in run(_bytes_per_parameter, 2, tmp_path, recipe, kind, True):
        assert 1 + 1 / 32 <= forward <= 1.04
        assert 1 / 2 + 1 / 16 <= backward <= 0.57
        assert wire.pop("all_gather_single") == counted, "what is counted is what went over the wire"
        assert sum(map(sum, wire.values())) <= 16, "amaxes of the tensor"
    for (forward, backward), _, _ in run(_bytes_per_parameter, 2, tmp_path, recipe, kind, False):
        assert forward == backward
        assert forward <= 1.04 + 0.57
    for passes, _, _ in run(_bytes_per_parameter, 2, tmp_path, recipe, "bf16", False):
        assert passes == [2, 2]


def test_tiles_travel_once(tmp_path):
    """Where one direction follows from the other, it is made after the gather, not sent."""
    for recipe, most in (("mxfp8-2d", 1.04), ("nvfp4", 0.57), ("fp8", 1.001)):
        for passes, _, _ in run(_bytes_per_parameter, 2, tmp_path, recipe, "quantized", False):
            assert max(passes) <= most, recipe


class Recomputed(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


def _recomputed(rank):
    x = torch.randn(32, 64, requires_grad=True)
    around = quantized_model("mxfp8")
    shard(around, mesh_of(2), reshard_after_forward=True)
    gather_by_pass(around)
    within = Recomputed(quantized_model("mxfp8")[0])
    fully_shard(within, mesh=mesh_of(2), reshard_after_forward=True)
    gather_by_pass(within)
    found = []
    for model in (Recomputed(around), within):
        loss = model(x).square().mean()
        found.append((loss.item(), error_of(loss.backward)))
    within.reset_iter_state()
    gather_by_pass(within, enabled=False)
    loss = within(x).square().mean()
    found.append((loss.item(), error_of(loss.backward)))
    return found


def test_recomputation(tmp_path):
    """Around sharded modules it brings both directions; inside one, rows are missing, which is said."""
    for around, within, switched_off in run(_recomputed, 2, tmp_path):
        assert around[1] is None
        assert "rowwise mxfp8 plane of this [128, 64] tensor has no memory" in within[1][1]
        assert switched_off == (within[0], None)


def test_models_that_are_not_sharded_are_refused():
    with pytest.raises(ValueError, match="no module of this Linear is sharded; call fully_shard first"):
        gather_by_pass(nn.Linear(4, 4))
