"""Megatron-FSDP over two ranks: the losses of the distributed optimizer, also of weights kept quantized. And FSDP2."""

import pytest

from ..common.megatron_runs import NEVER_CLIPPED, error_of_training, losses

OPTIONS = {"clip_grad": NEVER_CLIPPED}  # norms are added up from other pieces, and would scale gradients differently


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_shards_of_weights_kept_quantized_change_no_bit(recipe, megatron):
    options = {**OPTIONS, "recipe": recipe}
    expected = megatron(losses, 2, {**options, "distributed_optimizer": True})
    for kept in (False, True):
        assert megatron(losses, 2, {**options, "fsdp": True, "quantized_parameters": kept}) == expected


def test_hybrids_too_unless_they_are_kept_quantized(megatron):
    """Megatron lets go of the columns of whatever is not an MXFP8Tensor; those of a hybrid are missed."""
    options = {**OPTIONS, "recipe": "hybrid"}
    expected = megatron(losses, 2, {**options, "distributed_optimizer": True})
    assert megatron(losses, 2, {**options, "fsdp": True}) == expected
    for kind, text in megatron(error_of_training, 2, {**options, "fsdp": True, "quantized_parameters": True}):
        assert kind == "RuntimeError" and "has no columnwise plane, which dgrad reads: HybridQuantizedTensor" in text


@pytest.mark.parametrize("recipe", ["none", "tensorwise", "blockwise", "mxfp8", "nvfp4", "hybrid"])
def test_fsdp2_changes_no_bit(recipe, megatron):
    """In float32: Megatron's own wrapper reduces gradients of bfloat16 in float32, FSDP2 as they are."""
    options = {**OPTIONS, "recipe": recipe, "bf16": False}
    assert megatron(losses, 2, {**options, "torch_fsdp": True}) == megatron(losses, 2, options)
