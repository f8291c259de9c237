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


@pytest.mark.parametrize("factory", ["mxfp8_fwd_nvfp4_bwd", "mxfp8_fwd_high_precision_bwd"])
def test_nor_do_hybrids_whose_columns_are_made_from_the_rows(factory, megatron):
    """Megatron lets go of the columns of whatever is not an MXFP8Tensor; layers make them again."""
    config = {"fp8_quantizer_factory": f"crossgrain.recipe.zoo.{factory}_factory"}
    options = {**OPTIONS, "recipe": "hybrid", "layers": 1, "config": config}
    expected = megatron(losses, 2, {**options, "distributed_optimizer": True})
    for kept in (False, True):
        assert megatron(losses, 2, {**options, "fsdp": True, "quantized_parameters": kept}) == expected


def test_other_hybrids_are_refused_if_they_are_kept_quantized(megatron):
    config = {"fp8_quantizer_factory": "tests.common.megatron_runs.columns_of_their_own_factory"}
    options = {**OPTIONS, "recipe": "hybrid", "layers": 1, "config": config, "fsdp": True}
    assert megatron(error_of_training, 2, options) == [None, None]
    for kind, text in megatron(error_of_training, 2, {**options, "quantized_parameters": True}):
        assert kind == "RuntimeError" and "has no columnwise plane, which dgrad reads: HybridQuantizedTensor" in text
        assert "as Megatron-FSDP drops the columns" in text


@pytest.mark.parametrize(
    "options, ranks, reason",
    [
        ({"recipe": "hybrid", "torch_fsdp": True, "quantized_parameters": True}, 2, "FSDP2 does not take weights that"),
        ({"recipe": "nvfp4", "fsdp": True, "quantized_parameters": True}, 2, "does not take 4-bit parameters"),
        ({"fsdp": True}, 1, "adds every gradient to itself"),
    ],
)
def test_the_example_refuses_what_megatron_gets_wrong(options, ranks, reason, megatron):
    for kind, text in megatron(error_of_training, ranks, options):
        assert kind == "ValueError" and reason in text


@pytest.mark.parametrize("recipe", ["none", "tensorwise", "blockwise", "mxfp8", "nvfp4", "hybrid"])
def test_fsdp2_changes_no_bit(recipe, megatron):
    """In float32: Megatron's own wrapper reduces gradients of bfloat16 in float32, FSDP2 as they are."""
    options = {**OPTIONS, "recipe": recipe, "bf16": False}
    assert megatron(losses, 2, {**options, "torch_fsdp": True}) == megatron(losses, 2, options)
