"""Two ranks that share the texts of Megatron's GPT compute what one does.

Sums are added up in another order, in float32 here: 1e-6. With a recipe, blocks along tokens have other tokens, scales
of whole tensors are those of a rank's part, and a number on the edge between two codes may fall to the other side:
losses differ by parts of a thousand, with 4-bit gradients by a hundredth after five steps.
"""

import pytest

from ..common.megatron_runs import NEVER_CLIPPED, STEPS, losses

OTHER_CODES = {"mxfp8": 1e-3, "tensorwise": 1e-2, "nvfp4": 2e-2, "hybrid": 2e-2}


@pytest.mark.parametrize("how", ["p2p", "all_gather", "a2a"])
def test_two_ranks_compute_what_one_does(how, megatron):
    """With a learnable sink, whose gradient Megatron sums over the ranks. Norms show how large gradients are, which
    Adam does not mind; it makes more of small differences in them, so that norms agree to 1e-4 only.
    """
    options = {"bf16": False, "config": {"softmax_type": "learnable"}}
    [alone] = megatron(losses_and_megatrons_norms, 1, options)
    config = {**options["config"], "cp_comm_type": how}
    first, second = megatron(losses_and_megatrons_norms, 2, {**options, "context_parallel": 2, "config": config})
    assert first == second
    for (loss, norm), (expected, expected_norm) in zip(first, alone, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def losses_and_megatrons_norms(rank, options):
    import small_gpt

    return small_gpt.train(small_gpt.Options(**options), STEPS)


@pytest.mark.parametrize("recipe", OTHER_CODES)
def test_recipes_do_but_for_other_codes(recipe, megatron):
    options = {"recipe": recipe, "bf16": False, "clip_grad": NEVER_CLIPPED}
    [alone] = megatron(losses, 1, options)
    first, second = megatron(losses, 2, {**options, "context_parallel": 2})
    assert first == second
    assert first == pytest.approx(alone, rel=OTHER_CODES[recipe])


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "hybrid"])
def test_weights_kept_quantized_change_no_bit(recipe, megatron):
    """Both ranks have all weights, and a piece of each master."""
    options = {"recipe": recipe, "context_parallel": 2, "distributed_optimizer": True, "clip_grad": NEVER_CLIPPED}
    plain, kept = (megatron(losses, 2, {**options, "quantized_parameters": on}) for on in (False, True))
    assert kept == plain and plain[0] == plain[1]
