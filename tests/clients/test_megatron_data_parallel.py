"""Megatron's distributed optimizer over two ranks, with and without its gather of quantized parameters."""

import pytest

from ..common.megatron_runs import error_of_training, losses_and_norms, where_pieces_begin

RECIPES = ["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4", "hybrid"]
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 40_000}  # of one or two weights


FP4_HYBRID = {
    "fp4_recipe": "custom",
    "fp4_quantizer_factory": "crossgrain.recipe.zoo.nvfp4_row_scaled_fwd_high_precision_bwd_factory",
}


def equal_runs(megatron, ranks, options):
    """Losses and norms of gradients of every step, with weights in bf16 and with weights kept quantized."""
    options = {"distributed_optimizer": True, **options}
    plain, kept = (megatron(losses_and_norms, ranks, {**options, "quantized_parameters": on}) for on in (False, True))
    return kept == plain and all(found == plain[0] for found in plain)


@pytest.mark.parametrize("recipe", RECIPES)
def test_parameters_that_are_gathered_quantized_change_no_bit(recipe, megatron):
    assert equal_runs(megatron, 2, {"recipe": recipe})


@pytest.mark.parametrize("factory", ["high_precision_fwd_mxfp8_bwd", "nvfp4_1d_weight"])
def test_nor_do_hybrids_whose_rows_are_not_bytes_or_whose_columns_do_not_follow_from_them(factory, megatron):
    """Megatron's buffer has a byte for each number of a weight, and nothing else of it is gathered."""
    config = {"fp8_quantizer_factory": f"crossgrain.recipe.zoo.{factory}_factory"}
    assert equal_runs(megatron, 2, {"recipe": "hybrid", "layers": 1, "config": config})


def test_nor_do_hybrids_that_are_kept_as_fp4_parameters(megatron):
    assert equal_runs(megatron, 2, {"recipe": "nvfp4", "layers": 1, "config": FP4_HYBRID})


@pytest.mark.parametrize("options", [{"width": 96}, {"config": {"ffn_hidden_size": 224}}], ids=["norms", "a bias"])
def test_mxfp8_parameters_are_refused_where_megatron_would_copy_neighbours(options, megatron):
    """Megatron's buffers have gaps behind parameters of 96 and 224 elements, which it forgets about."""
    options = {**options, "recipe": "mxfp8", "distributed_optimizer": True, "layers": 1}
    for kind, text in megatron(error_of_training, 2, {**options, "quantized_parameters": True}):
        assert kind == "RuntimeError" and "with which every parameter has a multiple of 64 elements" in text
        assert f"[{options.get('width', 224)}] (" in text
    assert megatron(error_of_training, 2, options) == [None, None]


@pytest.mark.parametrize("recipe", ["blockwise", "hybrid"])
def test_nor_where_gathers_overlap_and_pieces_begin_inside_tiles(recipe, megatron):
    options = {"recipe": recipe, "ddp": OVERLAPPED}
    assert equal_runs(megatron, 2, options)
    cut = megatron(where_pieces_begin, 2, {**options, "distributed_optimizer": True, "quantized_parameters": True})
    assert any(start // columns % 128 for start, columns in cut[1])


@pytest.mark.parametrize("recipe", ["tensorwise", "hybrid"])
def test_nor_where_pieces_begin_inside_rows(recipe, megatron):
    """One bucket has a weight of 160 x 224 and one of 160 x 96: its middle is in a row of the former."""
    odd = {"kv_channels": 56, "ffn_hidden_size": 96}
    options = {"recipe": recipe, "width": 160, "config": odd, "ddp": OVERLAPPED}
    assert equal_runs(megatron, 2, options)
    cut = megatron(where_pieces_begin, 2, {**options, "distributed_optimizer": True, "quantized_parameters": True})
    assert any(start % columns for start, columns in cut[1])
