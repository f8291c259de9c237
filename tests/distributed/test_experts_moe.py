"""The mixture of experts of examples/moe.py: spread over ranks, it is what it is in one process."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg

from ..common.ranks import error_of, run

MOE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "moe.py"))
RECIPES = ("fp8", "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4")  # nothing is rounded at random
SENT_QUANTIZED = (  # columns of the input follow from its rows
    "fp8",
    "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4, input.source: dequantized",
    "nvfp4-plain, input.source: dequantized",
    "mxfp8-fwd-hp-bwd",
)


def first_step(recipe, sends_quantized=False, **recomputation):
    """Outputs of all tokens, and their gradients and those of the experts that are here by their number."""
    torch.manual_seed(0)
    model = MOE["MixtureOfExperts"](64, 128, 4, sends_quantized=sends_quantized)
    with torch.no_grad():
        model.router.bias[1] = -100.0
    rank = dist.get_rank() if model.ranks > 1 else 0
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).chunk(model.ranks)[rank].requires_grad_()
    with cg.autocast(recipe=cg.recipe.as_recipe(recipe)):
        out = cg.checkpoint(model, x, **recomputation) if recomputation else model(x)
    (out.square().sum() / 128).backward()
    gradients = {
        (name, rank * model.here + at): getattr(layer, f"weight{at}").grad.numpy().tobytes()
        for name, layer in (("up", model.experts.up), ("down", model.experts.down))
        for at in range(model.here)
    }
    gradients["x", rank] = x.grad.numpy().tobytes()
    return out.detach().float().numpy().tobytes(), gradients, model.counts.tolist()


def _ranks(rank):
    return {recipe: (first_step(recipe), MOE["train"](3, recipe)[0]) for recipe in RECIPES}


def same_gradients(of_ranks, alone):
    """Those of tokens are in the order of the ranks."""
    return of_ranks.pop(("x", 0)) + of_ranks.pop(("x", 1)) == alone.pop(("x", 0)) and of_ranks == alone


def test_two_ranks_are_one_process(tmp_path):
    one_process = {recipe: first_step(recipe) for recipe in RECIPES}
    first, second = run(_ranks, 2, tmp_path)
    for recipe, (out, gradients, counts) in one_process.items():
        (out0, gradients0, counts0), losses = first[recipe]
        (out1, gradients1, counts1), same_losses = second[recipe]
        assert out0 + out1 == out, recipe
        assert same_gradients(gradients0 | gradients1, gradients), recipe
        assert [a + b for a, b in zip(counts0, counts1, strict=True)] == counts
        assert counts[1] == 0, "an expert without tokens"
        assert not torch.frombuffer(bytearray(gradients["up", 1]), dtype=torch.float32).any()
        alone = MOE["train"](3, recipe)[0]
        assert losses == same_losses
        assert losses[0] == alone[0]
        # The gradient of the router is added up rank by rank, which rounds differently from the second step on.
        assert losses == pytest.approx(alone, rel=1e-4)
        assert alone[-1] < alone[0]


def _ranks_that_send_quantized(rank):
    return {recipe: first_step(recipe, sends_quantized=True) for recipe in SENT_QUANTIZED}


def test_two_ranks_that_send_quantized_tokens_are_one_process(tmp_path):
    alone = {recipe: first_step(recipe, sends_quantized=True) for recipe in SENT_QUANTIZED}
    first, second = run(_ranks_that_send_quantized, 2, tmp_path)
    for recipe, (out, gradients, _) in alone.items():
        assert first[recipe][0] + second[recipe][0] == out, recipe
        assert same_gradients(first[recipe][1] | second[recipe][1], gradients), recipe


def _ranks_that_recompute(rank):
    ways = ({}, {"use_reentrant": False}, {"use_reentrant": True})
    return [first_step(SENT_QUANTIZED[2], sends_quantized=True, **way) for way in ways]


def test_quantized_tokens_are_sent_again_to_be_recomputed(tmp_path):
    for kept, recomputed, reentrant in run(_ranks_that_recompute, 2, tmp_path):
        assert kept == recomputed == reentrant


def test_sending_quantized_tokens_changes_nothing_where_scales_belong_to_rows():
    """Experts quantize what they get; with a scale for a tensor, sent tokens have one for all experts together."""
    for recipe in SENT_QUANTIZED:
        for bf16 in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                plain, quantized = (first_step(recipe, sends_quantized) for sends_quantized in (False, True))
            assert (plain == quantized) == ("fprop: mxfp8" in str(cg.recipe.as_recipe(recipe))), (recipe, bf16)


def _uneven(rank):
    return error_of(lambda: MOE["MixtureOfExperts"](64, 64, 3))


def test_experts_that_cannot_be_dealt_out_are_refused(tmp_path):
    assert run(_uneven, 2, tmp_path) == [("ValueError", "3 experts cannot be dealt out to 2 ranks")] * 2
