"""Two ranks that share the texts of Megatron's GPT compute what one does.

Sums over ranks are added up in another order, in float32 here. With formats, a number on the edge between two codes may
fall to the other side, so that later steps differ by parts of a thousand.
"""

import pytest

from ..common.megatron_runs import losses


@pytest.mark.parametrize(
    "how, recipe, close",
    [("p2p", "none", 1e-6), ("all_gather", "none", 1e-6), ("a2a", "none", 1e-6), ("p2p", "mxfp8", 1e-3)],
)
def test_two_ranks_compute_what_one_does(how, recipe, close, megatron):
    """With a learnable sink, whose gradient Megatron sums over the ranks."""
    options = {"recipe": recipe, "bf16": False, "config": {"softmax_type": "learnable"}}
    [alone] = megatron(losses, 1, options)
    config = {**options["config"], "cp_comm_type": how}
    first, second = megatron(losses, 2, {**options, "context_parallel": 2, "config": config})
    assert first == second
    assert first[0] == pytest.approx(alone[0], rel=1e-6)
    assert first == pytest.approx(alone, rel=close)
