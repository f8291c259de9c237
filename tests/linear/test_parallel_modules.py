"""Modules that ranks share, against the whole module in one process.

Sums over ranks feed what comes after, so results are near those of one process, not the same: an error in what a
rank holds or adds would be as large as the result.
"""

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain.distributed import reduce_sequence_parallel_gradients

from ..common.families import make_recipe
from ..common.modules import step
from ..common.ranks import run

RANKS = 2
RECIPES = {"none": None, "mxfp8": make_recipe("mxfp8"), "fp8_current": make_recipe("fp8_current")}

HIDDEN, FFN, HEADS = 64, 128, 4
SEQUENCE, BATCH = 32, 2


def halves(parameter, parts):
    """What a rank has of each of ``parts`` equal parts, for each rank."""
    pieces = [part.chunk(RANKS) for part in parameter.chunk(parts)]
    return [torch.cat([piece[rank] for piece in pieces]) for rank in range(RANKS)]


def columns(parameter):
    return parameter.chunk(RANKS, 1)


def whole(parameter):
    return [parameter] * RANKS


class Case:
    """A module, how its parameters are cut, and how ranks share it."""

    def __init__(self, make, cuts, parallel):
        self.make, self.cuts, self.parallel = make, cuts, parallel

    def cut(self, name, tensor, rank):
        found = next((cut for key, cut in self.cuts.items() if name.endswith(key)), whole)
        return found(tensor)[rank]

    def whole_module(self):
        torch.manual_seed(0)
        module = self.make()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return module

    def shared_module(self, rank, sequence_parallel):
        module = self.make(**self.parallel, tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel)
        with torch.no_grad():
            for (name, mine), theirs in zip(module.named_parameters(), self.whole_module().parameters(), strict=True):
                mine.copy_(self.cut(name, theirs, rank))
        return module


def rows(parameter):
    return parameter.chunk(RANKS)


GATED = {"fc1_weight": lambda p: halves(p, 2), "fc1_bias": lambda p: halves(p, 2), "fc2_weight": columns}
MLP = {"fc1_weight": rows, "fc1_bias": rows, "fc2_weight": columns}
QKV = dict.fromkeys(("query_weight", "key_weight", "value_weight", "query_bias", "key_bias", "value_bias"), rows)
ATTENTION = {**QKV, "proj.weight": columns}
SHARED = {"set_parallel_mode": True}

CASES = {
    "layernorm_linear": Case(
        lambda **options: cg.LayerNormLinear(HIDDEN, FFN, **options),
        {"layer_norm_weight": whole, "layer_norm_bias": whole, "weight": rows, "bias": rows},
        {"parallel_mode": "column"},
    ),
    "layernorm_mlp": Case(
        lambda **options: cg.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options), GATED, SHARED
    ),
    "checkpointed": Case(lambda **options: cg.LayerNormMLP(HIDDEN, FFN, checkpoint=True, **options), MLP, SHARED),
    "attention": Case(
        lambda **options: cg.MultiheadAttention(
            HIDDEN, HEADS, num_gqa_groups=2, attention_dropout=0.0, qk_norm_type="RMSNorm", **options
        ),
        ATTENTION,
        SHARED,
    ),
    "interleaved": Case(
        lambda **options: cg.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, input_layernorm=True, fuse_qkv_params=True, **options
        ),
        {"layernorm_qkv.weight": rows, "layernorm_qkv.bias": rows, "proj.weight": columns},
        SHARED,
    ),
    "transformer": Case(
        lambda **options: cg.TransformerLayer(
            HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, activation="swiglu", **options
        ),
        {**ATTENTION, **GATED},
        SHARED,
    ),
}


def data(case):
    torch.manual_seed(1)
    width = FFN if case == "layernorm_linear" else HIDDEN
    return torch.randn(SEQUENCE, BATCH, HIDDEN), torch.randn(SEQUENCE, BATCH, width)


def on_ranks(rank, sequence_parallel):
    found = {}
    for name, case in CASES.items():
        for recipe_name, recipe in RECIPES.items():
            module = case.shared_module(rank, sequence_parallel)
            x, dy = data(name)
            if sequence_parallel:
                x = x.chunk(RANKS)[rank]
            if name == "layernorm_linear":
                dy = dy.chunk(RANKS, -1)[rank].contiguous()
            elif sequence_parallel:
                dy = dy.chunk(RANKS)[rank]
            found[name, recipe_name] = reduced_step(module, x, recipe, dy)
    return found


def reduced_step(module, x, recipe, dy):
    x = x.clone().requires_grad_()
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(dy)
    reduce_sequence_parallel_gradients(module)
    return {"y": y.detach(), "dx": x.grad} | {f"d {name}": p.grad for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def expected():
    found = {}
    for name, case in CASES.items():
        for recipe_name, recipe in RECIPES.items():
            x, dy = data(name)
            found[name, recipe_name] = step(case.whole_module(), x, recipe, dy)
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_modules(tmp_path, expected, sequence_parallel):
    parts = run(on_ranks, RANKS, tmp_path, sequence_parallel)
    for (name, recipe), results in expected.items():
        for key, theirs in results.items():
            for rank in range(RANKS):
                mine = parts[rank][name, recipe][key]
                part = theirs
                if key.startswith("d "):
                    part = CASES[name].cut(key[2:], theirs, rank)
                elif name == "layernorm_linear" and key == "y":
                    part = theirs.chunk(RANKS, -1)[rank]
                elif sequence_parallel:
                    part = theirs.chunk(RANKS)[rank]
                assert mine.shape == part.shape, (name, recipe, key)
                # A bias of all keys changes no softmax: its gradient is what rounding leaves of zero.
                error = (mine - part).norm() / max(theirs.norm(), 0.01 * results["dx"].norm())
                # A number that a sum over ranks moved by a bit may be rounded to the next code.
                assert error < (1e-5 if recipe == "none" else 2e-2), (name, recipe, key, rank, error)


def gathered_norms(rank):
    found = []
    for cls, options in ((cg.LayerNormLinear, {"parallel_mode": "column"}), (cg.LayerNormMLP, SHARED)):
        layer = cls(
            8, 16, **options, tp_group=dist.group.WORLD, sequence_parallel=True, return_layernorm_output_gathered=True
        )
        x = (torch.arange(32.0).reshape(4, 8).sin().chunk(RANKS)[rank]).requires_grad_()
        _, normalized = layer(x)
        normalized.backward(torch.ones(4, 8) * torch.arange(8.0))
        found.append((normalized.detach(), x.grad))
    return found


def test_gathered_norms(tmp_path):
    x = torch.arange(32.0).reshape(4, 8).sin().requires_grad_()
    y = cg.LayerNorm(8)(x)
    y.backward(torch.ones(4, 8) * torch.arange(8.0) * RANKS)  # a gradient from each rank
    for rank, found in enumerate(run(gathered_norms, RANKS, tmp_path)):
        for normalized, dx in found:
            assert torch.equal(normalized, y)
            assert torch.allclose(dx, x.grad.chunk(RANKS)[rank], rtol=1e-6, atol=1e-6)
