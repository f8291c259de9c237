"""Rows in forward, columns in backward: how many bytes travel, and that nothing else changes."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain.distributed import count_gathered_bytes, gather_by_pass, gather_quantized

from ..common.ranks import (
    GATHER,
    bind,
    converted_model,
    digest,
    error_of,
    high_precision,
    mesh_of,
    quantized_model,
    run,
    shard,
    train,
)

RECIPES = ("mxfp8-fwd-nvfp4-bwd", "nvfp4", "fp8", "mxfp8-fwd-hp-bwd")


def trained(recipe, mesh=None):
    """Both kinds of weights after four steps."""
    kept, converted = quantized_model(recipe), converted_model(recipe, hidden=90)
    if mesh is not None:
        gather_quantized(converted)
        for model in (kept, converted):
            gather_by_pass(shard(model, mesh))
    masters = cg.optim.FusedAdam(kept.parameters(), lr=1e-2, master_weights=True)
    adamw = torch.optim.AdamW(converted.parameters(), lr=1e-2)
    return train(kept, masters, 4), digest(kept), train(converted, adamw, 4), high_precision(converted)


def _trained(rank, ranks):
    return {recipe: trained(recipe, mesh_of(ranks)) for recipe in RECIPES}


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_is_what_it_was(tmp_path, ranks):
    alone = {recipe: trained(recipe) for recipe in RECIPES}
    for found in run(_trained, ranks, tmp_path, ranks):
        for recipe, (*numbers, weights) in alone.items():
            assert list(found[recipe][:3]) == numbers, recipe
            for name, value in weights.items():
                assert torch.equal(found[recipe][3][name], value), (recipe, name)


def _overridden(rank):
    found = []
    both = quantized_model("mxfp8")
    bind(both, OVERRIDDEN)
    for model in (converted_model(OVERRIDDEN), quantized_model(OVERRIDDEN), both):
        gather_quantized(model)
        gather_by_pass(shard(model, mesh_of(2)))
        found.append(error_of(lambda model=model: model(torch.randn(32, 64)).sum().backward()))
        if found[-1] is None:
            found.append(train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 4))
    return found


OVERRIDDEN = "mxfp8, backward_override: dequantized"


def test_backward_that_reads_rows(tmp_path):
    """Rows come again: of weights that are quantized for the gather, and of kept ones, which have nothing else.

    Kept weights that also have columns bring these, and it is said.
    """
    expected = []
    for model in (converted_model(OVERRIDDEN), quantized_model(OVERRIDDEN)):
        expected.append(train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 4))
    for error, converted, kept_error, kept, error_of_both in run(_overridden, 2, tmp_path):
        assert error is None
        assert kept_error is None
        assert [converted, kept] == expected
        assert "rowwise mxfp8 plane of this [64, 128] tensor has no memory" in error_of_both[1]


class Wire:
    """Bytes of every collective that this process takes part in, by the size of what arrives."""

    def __init__(self):
        self.sizes = {}
        for name in (GATHER, "all_gather", "all_reduce"):
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
        assert wire.pop(GATHER) == counted, "what is counted is what went over the wire"
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


class Block(nn.Module):
    """Two sharded layers of which the first may be recomputed in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = quantized_model("mxfp8-fwd-nvfp4-bwd")[:3], reentrant

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def gradients(model):
    torch.manual_seed(1)
    model(torch.randn(32, 64, requires_grad=True)).square().mean().backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


def _recomputed_one_by_one(rank, reentrant):
    model = Block(reentrant)
    shard(model.layers, mesh_of(2), reshard_after_forward=True)
    gather_by_pass(model)
    found, count = gradients(model), count_gathered_bytes(model)
    model(torch.randn(32, 64, requires_grad=True)).sum().backward()
    return found, count.sizes


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_recomputed_one_by_one(tmp_path, reentrant):
    """FSDP2 prefetches a layer for its backward pass, and the recomputed forward pass comes first."""
    expected = gradients(Block(None))
    for found, (first, second, *backward) in run(_recomputed_one_by_one, 2, tmp_path, reentrant):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert len(backward) == 2, "no layer is gathered twice"
        assert backward[0] > second, "both directions"
        assert backward[1] > first


def _accumulated(rank):
    model = quantized_model("mxfp8-fwd-nvfp4-bwd")
    gather_by_pass(shard(model, mesh_of(2), reshard_after_forward=True))
    count = count_gathered_bytes(model)
    gathered = []
    model.register_forward_hook(lambda *_: gathered.append(count.total))
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        gathered.append(count.total)
        found = gradients(model) if last else model(torch.ones(32, 64)).sum().backward()
    return gathered[3] - gathered[2], found


def test_weights_that_stay_gathered_after_backward(tmp_path):
    """Both directions, for the next forward pass."""
    alone = quantized_model("mxfp8-fwd-nvfp4-bwd")
    alone(torch.ones(32, 64)).sum().backward()
    expected = gradients(alone)
    for again, found in run(_accumulated, 2, tmp_path):
        assert again == 0
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _failed(rank):
    model = quantized_model("mxfp8-fwd-nvfp4-bwd")
    gather_by_pass(shard(model, mesh_of(2), reshard_after_forward=True))
    hook = model[1].register_full_backward_hook(lambda *_: "no gradient")
    failed = error_of(model(torch.ones(32, 64)).sum().backward)
    hook.remove()
    return failed, model(torch.ones(32, 64)).detach()


def test_a_forward_pass_after_a_backward_pass_that_failed(tmp_path):
    """Columns are there, and rows are gathered."""
    expected = quantized_model("mxfp8-fwd-nvfp4-bwd")(torch.ones(32, 64)).detach()
    for failed, y in run(_failed, 2, tmp_path):
        assert failed is not None
        assert torch.equal(y, expected)


def _offloaded(rank):
    found = []
    for kind in (quantized_model, converted_model):
        for hooks in (contextlib.nullcontext(), cg.offload("host", min_bytes=0)):
            model = kind("mxfp8-fwd-nvfp4-bwd")
            gather_quantized(model)
            gather_by_pass(shard(model, mesh_of(2), reshard_after_forward=True))
            torch.manual_seed(1)
            with hooks:
                loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            found.append([p.grad.full_tensor() for p in model.parameters()])
    return found


def test_offloading_leaves_weights_that_will_be_gathered_again(tmp_path):
    for kept, kept_offloaded, converted, converted_offloaded in run(_offloaded, 2, tmp_path):
        for expected, gradients in ((kept, kept_offloaded), (converted, converted_offloaded)):
            assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_models_that_are_not_sharded_are_refused():
    with pytest.raises(ValueError, match="no module of this Linear is sharded; call fully_shard first"):
        gather_by_pass(nn.Linear(4, 4))
