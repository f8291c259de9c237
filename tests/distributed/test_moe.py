"""The mixture of experts of examples/moe.py: spread over ranks, it is what it is in one process."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg

from .ranks import error_of, run

MOE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "moe.py"))
RECIPES = ("fp8", "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4")  # nothing is rounded at random


def first_step(recipe):
    """Outputs of all tokens, and the gradients of the experts that are here by their number."""
    torch.manual_seed(0)
    model = MOE["MixtureOfExperts"](64, 128, 4)
    with torch.no_grad():
        model.router.bias[1] = -100.0
    rank = dist.get_rank() if model.ranks > 1 else 0
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).chunk(model.ranks)[rank]
    with cg.autocast(recipe=cg.recipe.as_recipe(recipe)):
        out = model(x)
    (out.square().sum() / 128).backward()
    gradients = {
        (name, rank * model.here + at): getattr(layer, f"weight{at}").grad.numpy().tobytes()
        for name, layer in (("up", model.experts.up), ("down", model.experts.down))
        for at in range(model.here)
    }
    return out.detach().numpy().tobytes(), gradients, model.counts.tolist()


def _ranks(rank):
    return {recipe: (first_step(recipe), MOE["train"](3, recipe)[0]) for recipe in RECIPES}


def test_two_ranks_are_one_process(tmp_path):
    first, second = run(_ranks, 2, tmp_path)
    for recipe in RECIPES:
        out, gradients, counts = first_step(recipe)
        (out0, gradients0, counts0), losses = first[recipe]
        (out1, gradients1, counts1), same_losses = second[recipe]
        assert out0 + out1 == out, recipe
        assert gradients0 | gradients1 == gradients, recipe
        assert [a + b for a, b in zip(counts0, counts1, strict=True)] == counts
        assert counts[1] == 0, "an expert without tokens"
        assert not torch.frombuffer(bytearray(gradients["up", 1]), dtype=torch.float32).any()
        alone = MOE["train"](3, recipe)[0]
        assert losses == same_losses
        assert losses[0] == alone[0]
        # The gradient of the router is added up rank by rank, which rounds differently from the second step on.
        assert losses == pytest.approx(alone, rel=1e-4)
        assert alone[-1] < alone[0]


def _uneven(rank):
    return error_of(lambda: MOE["MixtureOfExperts"](64, 64, 3))


def test_experts_that_cannot_be_dealt_out_are_refused(tmp_path):
    assert run(_uneven, 2, tmp_path) == [("ValueError", "3 experts cannot be dealt out to 2 ranks")] * 2
