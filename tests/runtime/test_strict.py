"""Strict mode refuses what Transformer Engine refuses, with its exception and key phrase; otherwise it works here."""

from pathlib import Path

import pytest
import torch

import crossgrain as cg
from crossgrain import ops
from crossgrain.optim.weight_update import quantize_master_weights
from crossgrain.runtime.strict import LIMITS

FP8 = cg.DType.kFloat8E4M3


def x(rows=64, columns=64, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.randn(rows, columns, dtype=dtype)


def fp8():
    return cg.Float8CurrentScalingQuantizer(FP8, torch.device("cpu"))


def hybrid_of(row, column, source="original"):
    return cg.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source)


def nested_request():
    hybrid_of(cg.recipe.DelayedScalingRequest(), cg.MXFP8Quantizer(FP8))


def storages_in_a_hybrid():
    quantizer = hybrid_of(cg.MXFP8Quantizer(FP8), fp8())
    quantizer.rowwise_quantizer.internal = True
    quantizer(x()).detach()


def other_usages():
    whole, rows = hybrid_of(cg.MXFP8Quantizer(FP8), fp8()), hybrid_of(cg.MXFP8Quantizer(FP8), fp8())
    rows.set_usage(columnwise=False)
    rows(x()).copy_(whole(x()))


def cut_blocks():
    assert len(hybrid_of(fp8(), cg.MXFP8Quantizer(FP8))(x()).split(16)) == 4


def nvfp4_in_fsdp2():
    hybrid_of(cg.MXFP8Quantizer(FP8), cg.NVFP4Quantizer())(x()).fsdp_pre_all_gather(None)


def write_master(quantizer):
    weight = torch.nn.Parameter(quantizer(x()))
    quantize_master_weights([weight], [x(dtype=torch.float32).reshape(-1)], [0], None)


def masters_of_blocks():
    write_master(hybrid_of(fp8(), cg.MXFP8Quantizer(FP8)))


def masters_of_derived_columns():
    write_master(hybrid_of(fp8(), fp8(), "rowwise_dequantized"))


def masters_of_1x16():
    write_master(cg.NVFP4Quantizer())


def rebound_channels():
    split, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    sequence = ops.Sequential(split, ops.Identity(), add)
    sequence(x(), x())
    split.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    assert torch.equal(sequence(x()), x() + x())


def mixed_operands():
    """Otherwise the error comes before anything is computed, and is another."""

    def factory(role):
        return fp8() if role is not None and role.tensor_type == "weight" else cg.MXFP8Quantizer(FP8)

    with cg.autocast(recipe=cg.recipe.CustomRecipe(factory)):
        cg.Linear(64, 64)(x(dtype=torch.float32))


def columns_of_fp8():
    quantizer = fp8()
    quantizer.set_usage(rowwise=False)
    with cg.settings.override(non_tn_fp8_gemm=False):
        quantizer(x()).dequantize()


def columns_of_nvfp4():
    cg.NVFP4Quantizer(rowwise=False)(x()).dequantize()


def rotated_float32():
    cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)(x(dtype=torch.float32))


def row_scaled_columns():
    cg.NVFP4Quantizer(rowwise=False, row_scaled_nvfp4=True)(x())


def partial_blocks():
    cg.MXFP8Quantizer(FP8, columnwise=False)(x(48, 64))


CASES = {
    "nested request": nested_request,
    "storages in a hybrid": storages_in_a_hybrid,
    "other usages": other_usages,
    "pieces that cut blocks of a hybrid": cut_blocks,
    "NVFP4 of a hybrid in FSDP2": nvfp4_in_fsdp2,
    "masters of block formats in a hybrid": masters_of_blocks,
    "masters of derived columns": masters_of_derived_columns,
    "masters of NVFP4 1x16": masters_of_1x16,
    "channels of a sequence in use": rebound_channels,
    "operands of different formats": mixed_operands,
    "columns of FP8 alone": columns_of_fp8,
    "columns of NVFP4 alone": columns_of_nvfp4,
    "dtype of rotated NVFP4": rotated_float32,
    "columns of row-scaled NVFP4": row_scaled_columns,
    "partial blocks": partial_blocks,
}


def test_every_limit_has_a_case():
    assert CASES.keys() == LIMITS.keys()


@pytest.mark.parametrize("limit", CASES)
def test_what_strict_mode_refuses_works_otherwise(limit):
    known = LIMITS[limit]
    with cg.settings.override(strict=True), pytest.raises(known.error, match=known.phrase) as caught:
        CASES[limit]()
    assert type(caught.value) is known.error
    if limit == "operands of different formats":  # an error in both modes: earlier, and a ValueError
        with pytest.raises(ValueError, match="layer .* both operands of a GEMM have to be scaled alike"):
            CASES[limit]()
    else:
        CASES[limit]()


def test_storages_of_a_hybrid_are_not_gathered_in_strict_mode():
    quantizer = hybrid_of(cg.MXFP8Quantizer(FP8), fp8())
    quantizer.columnwise_quantizer.internal = True
    tensor = quantizer(x())
    with cg.settings.override(strict=True), pytest.raises(NotImplementedError, match="does not support storage-only"):
        tensor.fsdp_pre_all_gather(None)


def test_writes_in_strict_mode_refresh_only_what_is_in_use_and_the_rest_is_stale():
    quantizer = hybrid_of(cg.MXFP8Quantizer(FP8), fp8())
    tensor = quantizer(x())
    rows, columns = (tensor.dequantize(direction=direction) for direction in (cg.ROWWISE, cg.COLUMNWISE))
    quantizer.set_usage(columnwise=False)
    with cg.settings.override(strict=True):
        quantizer.update_quantized(2 * x(), tensor)
    assert torch.equal(tensor.dequantize(direction=cg.ROWWISE), 2 * rows)
    with pytest.raises(RuntimeError, match="stale"):
        tensor.dequantize(direction=cg.COLUMNWISE)
    quantizer.update_quantized(2 * x(), tensor)
    assert torch.equal(tensor.dequantize(direction=cg.COLUMNWISE), 2 * columns)


def test_the_page_lists_what_strict_mode_refuses():
    page = Path(__file__).parents[2].joinpath("docs", "how-to", "transformer_engine.md").read_text()
    for known in LIMITS.values():
        assert f"| {known.lifted} | `{known.error.__name__}` |" in page
