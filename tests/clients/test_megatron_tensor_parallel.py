"""Two ranks that share the layers of Megatron's GPT compute what one does.

Sums over ranks are added up in another order, in float32 here: 1e-7. Losses of the first step differ by no more. Then a
number on the edge between two codes may fall to the other side, in gradients of E5M2 by an eighth of it or more,
and later steps differ by parts of a thousand.
"""

import pytest

from ..common.megatron_runs import NEVER_CLIPPED, losses

ORDER_OF_SUMS = 1e-6
OTHER_CODES = {"none": ORDER_OF_SUMS, "delayed": 1e-3, "mxfp8": 1e-3, "tensorwise": 5e-3, "hybrid": 1e-2}


@pytest.mark.parametrize("recipe", OTHER_CODES)
def test_two_ranks_compute_what_one_does(recipe, megatron):
    # Megatron's initialization on the CPU makes the whole weight and takes a part; on GPUs ranks draw their own.
    options = {"recipe": recipe, "bf16": False, "config": {"use_cpu_initialization": True}}
    [alone] = megatron(losses, 1, options)
    shared = megatron(losses, 2, {**options, "tensor_parallel": 2})
    sequences = megatron(losses, 2, {**options, "tensor_parallel": 2, "sequence_parallel": True})
    for first, second in (shared, sequences):
        assert first == second
        assert first[0] == pytest.approx(alone[0], rel=ORDER_OF_SUMS)
        assert first == pytest.approx(alone, rel=OTHER_CODES[recipe])
    assert sequences[0] == pytest.approx(shared[0], rel=OTHER_CODES[recipe])


@pytest.mark.parametrize("recipe, ranks", [("mxfp8", 2), ("hybrid", 2), ("tensorwise", 4)])
def test_weights_kept_quantized_change_no_bit(recipe, ranks, megatron):
    """Two ranks share the layers; of four, pairs share what the distributed optimizer updates."""
    options = {"recipe": recipe, "tensor_parallel": 2, "sequence_parallel": True, "distributed_optimizer": True}
    options["clip_grad"] = NEVER_CLIPPED  # norms are added up from other pieces
    plain, kept = (megatron(losses, ranks, {**options, "quantized_parameters": on}) for on in (False, True))
    assert kept == plain and all(found == plain[0] for found in plain)
