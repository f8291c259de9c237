"""Options of Megatron that lean on the layers: recomputation, gradients added in place."""

import pytest

from ..common.megatron_runs import error_of_training, losses_and_norms

RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    **{
        module: {"recompute_granularity": "selective", "recompute_modules": [module]}
        for module in ("core_attn", "mlp", "layernorm")
    },
}


@pytest.mark.parametrize("recipe", ["none", "mxfp8", "delayed", "nvfp4", "hybrid"])
def test_recomputation_changes_no_bit(recipe, megatron):
    """Megatron refuses norms with delayed scaling. Of an MLP in high precision it takes its own checkpoint, whose
    backward calls itself without end if the MLP returns a bias, be it of its own layers or ours.
    """
    [kept] = megatron(losses_and_norms, 1, {"recipe": recipe})
    for name, config in RECOMPUTED.items():
        if (recipe, name) not in (("delayed", "layernorm"), ("none", "mlp")):
            assert megatron(losses_and_norms, 1, {"recipe": recipe, "config": config}) == [kept], name


def test_megatron_refuses_to_compute_norms_again_with_delayed_scaling(megatron):
    [(kind, text)] = megatron(error_of_training, 1, {"recipe": "delayed", "config": RECOMPUTED["layernorm"]})
    assert kind == "ValueError" and "Delayed scaling does not support" in text


@pytest.mark.parametrize("recipe", ["none", "mxfp8", "hybrid"])
def test_gradients_added_to_main_grad_in_place(recipe, megatron):
    """In float32, where nothing is rounded on the way, no bit differs. Two microbatches: the second adds."""
    options = {"recipe": recipe, "bf16": False, "microbatches": 2}
    [apart] = megatron(losses_and_norms, 1, options)
    [in_place] = megatron(losses_and_norms, 1, {**options, "config": {"gradient_accumulation_fusion": True}})
    assert in_place == apart
