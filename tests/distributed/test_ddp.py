"""DistributedDataParallel around models with quantized layers: bitwise what one process does."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import crossgrain as cg
from crossgrain.recipe import read_extra_state
from crossgrain.tensor.init_values import preserved_value

from ..common.ranks import batches, bind, converted_model, digest, error_of, mixed_layers, quantized_model, run, train

RECIPES = ("mxfp8", "fp8", "fp8-delayed", "nvfp4-plain", "mxfp8-fwd-nvfp4-bwd")
OPTIONS = (
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0.01},  # several buckets
    {},
)


def models(recipe, seed=0):
    """One with weights kept quantized, one converted; each with its optimizer."""
    kept, converted = quantized_model(recipe, seed=seed), converted_model(recipe, seed=seed)
    return [
        (kept, cg.optim.FusedAdam(kept.parameters(), lr=1e-2, master_weights=True)),
        (converted, torch.optim.AdamW(converted.parameters(), lr=1e-2)),
    ]


class Wrapped(DistributedDataParallel):
    """Shows the layers of what it wraps."""

    def __getitem__(self, at):
        return self.module[at]


def _same_batches(rank, cases):
    """Ranks begin with other weights, and are given those of the first; both see the same batches."""
    found = {}
    for recipe, options in cases:
        found[recipe] = []
        for model, _ in models(recipe, seed=rank):
            wrapped = Wrapped(model, **options)
            optimizer = optimizer_of(model)
            found[recipe].append((train(wrapped, optimizer), digest(model)))
    return found


def optimizer_of(model):
    if any(isinstance(parameter, cg.QuantizedTensor) for parameter in model.parameters()):
        return cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_ten_steps_are_those_of_one_process(tmp_path):
    """Losses, and all bytes of all weights, on both ranks: the mean of two equal gradients is exact."""
    alone = {recipe: [(train(*pair), digest(pair[0])) for pair in models(recipe)] for recipe in RECIPES}
    cases = list(zip(RECIPES, OPTIONS, strict=True))
    assert run(_same_batches, 2, tmp_path, cases) == [alone, alone]


def _own_batches(rank, recipe):
    found = []
    for model, optimizer in models(recipe):
        wrapped = DistributedDataParallel(model)
        for step in range(5):
            x = batches(1, seed=2 * step + rank)[0] * (1 + 3 * rank)
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [read_extra_state(module.get_extra_state()) for module in model if isinstance(module, cg.Linear)]
        histories = [leaf.tolist() for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor)]
        found.append((digest(model), histories))
    return found


def test_delayed_scaling_of_batches_that_differ(tmp_path):
    """All ranks have the scales of the largest; without the reduction each has scales of its own batches."""
    first, second = run(_own_batches, 2, tmp_path, cg.recipe.DelayedScaling(amax_history_len=4))
    assert first == second
    first, second = run(_own_batches, 2, tmp_path, cg.recipe.DelayedScaling(amax_history_len=4, reduce_amax=False))
    assert all(one[0] == other[0] and one[1] != other[1] for one, other in zip(first, second, strict=True))


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = cg.Linear(64, 64), cg.Linear(64, 64)

    def forward(self, x):
        return self.used(x)


def branches():
    torch.manual_seed(0)
    with cg.quantized_model_init(recipe="mxfp8"):
        model = Branches()
    bind(model, "mxfp8")
    return model


def _unused(rank):
    model = branches()
    before = [buffer.clone() for _, buffer in model.unused.weight._buffers()]
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model)
    for x in batches(3):
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    after = [buffer for _, buffer in model.unused.weight._buffers()]
    return all(map(torch.equal, before, after)), digest(model.used)


def test_unused_parameters_stay_as_they_are(tmp_path):
    model = branches()
    optimizer = optimizer_of(model)
    for x in batches(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert run(_unused, 2, tmp_path) == [(True, digest(model.used))] * 2


def _preserved(rank):
    torch.manual_seed(rank)
    with cg.quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
        model = mixed_layers(cg.Linear)
    bind(model, "mxfp8")
    had = preserved_value(model[0].weight) is not None
    wrapped = Wrapped(model)
    has = preserved_value(model[0].weight) is not None
    train(wrapped, optimizer_of(model), 3)
    return had, has, digest(model)


def test_masters_begin_equal_on_all_ranks(tmp_path):
    """A rank knows the values that its own weights were made from, not those it was sent."""
    first, second = run(_preserved, 2, tmp_path)
    assert first == second
    assert first[:2] == (True, False)


def _different_planes(rank):
    model = quantized_model("mxfp8")
    if rank == 1:
        model[0].weight.update_usage(columnwise_usage=False)
    return error_of(lambda: DistributedDataParallel(model))


def test_models_with_other_planes_are_refused_on_all_ranks(tmp_path):
    for kind, text in run(_different_planes, 2, tmp_path):
        assert kind == "RuntimeError"
        assert "different ranks have different planes" in text


def _unreduced(rank):
    found = []
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        layer = cg.Linear(64, 64, **{option: True})
        layer.weight.main_grad = torch.zeros(64, 64)
        model = nn.Sequential(layer, nn.Linear(64, 64))
        found.append(error_of(lambda model=model: DistributedDataParallel(model)(torch.randn(32, 64))))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        found.append(error_of(lambda model=model: DistributedDataParallel(model)(torch.randn(32, 64))))
    return found


def test_weight_gradients_that_ddp_would_not_reduce_are_refused(tmp_path):
    """Unless DDP was told to leave the weight alone."""
    (found,) = run(_unreduced, 1, tmp_path)
    for error in found[::2]:
        assert error is not None
        assert error[0] == "RuntimeError"
        assert "replicated by DistributedDataParallel" in error[1]
    assert found[1::2] == [None, None]
