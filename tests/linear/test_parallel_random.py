"""Stochastic rounding in layers that ranks share: the random numbers are those of one process.

The generators of the ranks have different states; that of the first rank is the state of the one process.
"""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.runtime.random_numbers import draw_seed

from ..common.quantizers import E4M3
from ..common.ranks import run
from .test_parallel import (
    assert_whole,
    part,
    parts_of_step,
    put_together,
    random_numbers,
    shared_layer,
    tensors,
    with_weights,
)

RANKS = 2
SHAPE = (64, 64, 128)  # M, K, N: each rank has whole blocks of 32
SHARED = [(mode, sequence_parallel) for mode in ("column", "row") for sequence_parallel in (False, True)]


def everything_at_random(role):
    tensor = None if role is None else role.tensor_type
    if tensor == "weight":
        return cg.NVFP4Quantizer(with_2d_quantization=True, stochastic_rounding=True)
    return cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True)


def different_directions(role):
    """Rowwise stochastic, columnwise to nearest and the other way round; columns of the weight from its rows."""
    tensor = None if role is None else role.tensor_type
    rows, columns = (
        cg.NVFP4Quantizer(stochastic_rounding=True),
        cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    )
    if tensor == "weight":
        columns, source = cg.NVFP4Quantizer(stochastic_rounding=True), "rowwise_dequantized"
    else:
        source = "original"
        columns.stochastic_rounding = tensor == "grad_output"
        rows.stochastic_rounding = tensor == "input"
    return cg.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns, columnwise_source=source)


RECIPES = {
    "nvfp4": recipes.NVFP4BlockScaling(),
    "mxfp8, nvfp4": recipes.as_recipe("fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"),
    "1d weights": recipes.as_recipe("nvfp4-1d-weight"),
    "mxfp4": recipes.as_recipe("mxfp4"),
    "everything": recipes.CustomRecipe(qfactory=everything_at_random),
    "directions": recipes.CustomRecipe(qfactory=different_directions),
}


def step(layer, x, dy, recipe, rank=0):
    """Results, and the number that the generator gives next."""
    torch.manual_seed(100 + rank)
    x = x.clone().requires_grad_()
    with cg.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    results = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}
    return results, torch.rand(1)


def on_ranks(rank):
    found = {}
    for name, recipe in RECIPES.items():
        x, w, b, dy = tensors(name, random_numbers, RANKS, SHAPE)
        for mode, sequence_parallel in SHARED:
            layer = shared_layer(rank, RANKS, mode, sequence_parallel, w, b)
            mine = parts_of_step(rank, RANKS, mode, sequence_parallel, x, dy)
            found[name, mode, sequence_parallel] = step(layer, *mine, recipe, rank)
    return found


def number_after(seeds, rank):
    torch.manual_seed(100 + rank)
    for _ in range(seeds):
        draw_seed()
    return torch.rand(1)


def test_two_ranks_round_as_one_process_does(tmp_path):
    expected, following = {}, {}
    for name, recipe in RECIPES.items():
        x, w, b, dy = tensors(name, random_numbers, RANKS, SHAPE)
        expected[name], following[name] = step(with_weights(cg.Linear(*reversed(w.shape)), w, b), x, dy, recipe)
    parts = run(on_ranks, RANKS, tmp_path)
    for name in RECIPES:
        seeds = next(n for n in range(9) if number_after(n, 0) == following[name])
        assert seeds > 0, name
        for mode, sequence_parallel in SHARED:
            of_ranks = [found[name, mode, sequence_parallel] for found in parts]
            summed = {"column": {"dx"}, "row": {"y", "db"} if sequence_parallel else {"y"}}[mode]
            whole = put_together([results for results, _ in of_ranks], mode, sequence_parallel)
            assert_whole(whole, expected[name], summed, False, (name, mode, sequence_parallel))
            for rank, (_, number) in enumerate(of_ranks):  # dropout that follows is that of the rank's own generator
                assert number == number_after(seeds, rank), (name, mode, sequence_parallel, rank)


# ---- pieces that are divided separately ----------------------------------------------------------------------


def mlp(rank=None, **options):
    torch.manual_seed(0)
    module = cg.LayerNormMLP(64, 64, activation="swiglu", bias=False, **options)
    whole = cg.LayerNormMLP(64, 64, activation="swiglu", bias=False) if rank is not None else module
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(p.shape, generator=generator) for name, p in whole.named_parameters()}
    if rank is not None:
        weights["fc1_weight"] = torch.cat([part(half, rank, RANKS, 0) for half in weights["fc1_weight"].chunk(2)])
        weights["fc2_weight"] = part(weights["fc2_weight"], rank, RANKS, 1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    return module


def split_linear(rank=None, **options):
    sizes = {"query_": 64, "key_": 32, "value_": 32}
    module = cg.Linear(64, 128, bias=False, parameters_split=sizes, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, rows in sizes.items():
            weight = torch.randn(rows, 64, generator=generator)
            getattr(module, f"{name}weight").copy_(weight if rank is None else part(weight, rank, RANKS, 0))
    return module


def gradients(module, x, dy, rank=0, recompute=False):
    torch.manual_seed(100 + rank)
    x = x.clone().requires_grad_()
    with cg.autocast(recipe=RECIPES["everything"]):
        y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    y.backward(dy)
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def inputs():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(32, 64, generator=generator), torch.randn(32, 64, generator=generator)


def split_gradient(dy):
    return torch.cat([dy, dy.flip(0)], dim=1)


def pieces_on_ranks(rank):
    x, dy = inputs()
    world = dist.group.WORLD
    gated = mlp(rank, set_parallel_mode=True, tp_group=world)
    found = gradients(gated, x, dy, rank)
    split = split_linear(rank, parallel_mode="column", tp_group=world)
    mine = torch.cat([part(piece, rank, RANKS, 1) for piece in split_gradient(dy).split([64, 32, 32], 1)], 1)
    again = gradients(split_linear(rank, parallel_mode="column", tp_group=world), x, mine, rank, recompute=True)
    return found | gradients(split, x, mine, rank), again


def test_pieces_that_ranks_divide_separately_are_rounded_as_in_the_whole(tmp_path):
    """dW of a gated MLP and of separate queries, keys and values: nothing in them is summed over ranks."""
    x, dy = inputs()
    expected = gradients(mlp(), x, dy)
    fc1, fc2 = expected["fc1_weight"].chunk(2), expected["fc2_weight"]
    split = gradients(split_linear(), x, split_gradient(dy))
    recomputed = gradients(split_linear(), x, split_gradient(dy), recompute=True)
    for rank, (found, again) in enumerate(run(pieces_on_ranks, RANKS, tmp_path)):
        halves = torch.cat([part(half, rank, RANKS, 0) for half in fc1])
        assert torch.equal(found["fc1_weight"], halves)
        assert torch.equal(found["fc2_weight"], part(fc2, rank, RANKS, 1))
        for name, gradient in split.items():
            assert torch.equal(found[name], part(gradient, rank, RANKS, 0)), name
            assert torch.equal(recomputed[name], gradient), name
            assert torch.equal(again[name], found[name]), name


def test_a_fused_weight_that_is_not_interleaved_has_three_pieces():
    fused = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
    attention = cg.MultiheadAttention(64, 4, num_gqa_groups=2, tp_size=2, set_parallel_mode=True, **fused)
    assert attention.qkv._segments(0) == (32, 16, 16)
    fused["qkv_weight_interleaved"] = True
    attention = cg.MultiheadAttention(64, 4, num_gqa_groups=2, tp_size=2, set_parallel_mode=True, **fused)
    assert attention.qkv._segments(0) == (64,)


# ---- collectives ---------------------------------------------------------------------------------------------


def collectives(rank):
    """The number of reductions, and of their numbers, that one quantization takes."""
    sent, reduce = [], dist.all_reduce

    def counting(x, **options):
        sent.append(x.numel())
        return reduce(x, **options)

    dist.all_reduce = counting
    found = {}
    makers = {
        "nvfp4": everything_at_random(None),
        "hybrid": different_directions(None),
        "mxfp4": cg.FormatQuantizer("mxfp4", stochastic_rounding=True),
        "mxfp8": cg.MXFP8Quantizer(E4M3),
        "nearest": cg.NVFP4Quantizer(),
    }
    for name, quantizer in makers.items():
        for how, own in (
            ("part", quantizer.reducing(dist.group.WORLD, axis=1)),
            ("whole", quantizer.same_on(dist.group.WORLD)),
        ):
            sent.clear()
            own.make_planes(torch.ones(32, 32), rowwise=True, columnwise=True)
            found[name, how] = list(sent)
    return found


def test_seeds_travel_with_amaxes(tmp_path):
    """Four numbers for a seed, and one for the amax of each direction, in one collective."""
    expected = {
        ("nvfp4", "part"): [6],
        ("nvfp4", "whole"): [4],
        ("hybrid", "part"): [2],  # it rounds to nearest
        ("hybrid", "whole"): [],
        ("mxfp4", "part"): [4],
        ("mxfp4", "whole"): [4],
        ("mxfp8", "part"): [],
        ("mxfp8", "whole"): [],
        ("nearest", "part"): [2],
        ("nearest", "whole"): [],
    }
    assert run(collectives, RANKS, tmp_path) == [expected] * RANKS


@pytest.mark.parametrize("usages", [(True, True), (False, True)])
def test_without_ranks_a_seed_is_one_draw(usages):
    torch.manual_seed(5)
    everything_at_random(None).make_planes(torch.ones(32, 32), rowwise=usages[0], columnwise=usages[1])
    after = torch.rand(1)
    torch.manual_seed(5)
    draw_seed()
    assert torch.equal(torch.rand(1), after)
