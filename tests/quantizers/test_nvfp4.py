"""NVFP4: fields, shapes, options, both directions, strict mode."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, DType, kernels
from crossgrain.kernels.reference.hadamard import rotate

from ..common.quantizers import assert_same_bytes


def rht(**options):
    return cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **options)


def test_fields():
    x = torch.randn(3, 16, 64)  # M = 48
    q = cg.quantize(x, "nvfp4")
    assert q._rowwise_data.shape == (3, 16, 32)
    assert q._columnwise_data.shape == (64, 24), "columnwise data is transposed and two-dimensional"
    assert q._rowwise_scale_inv.shape == (128, 4)
    assert q._columnwise_scale_inv.shape == (128, 4)
    assert q._amax_rowwise.shape == q._amax_columnwise.shape == (1,)
    assert q._amax_rowwise == x.abs().max()
    assert q._fp4_dtype == DType.kFloat4E2M1
    assert (q._row_scaled_nvfp4, q._nvfp4_use_4over6, q._nvfp4_e4m3_max) == (False, False, 448)
    quantizer = cg.NVFP4Quantizer()
    assert quantizer.get_scale_shape((48, 256), columnwise=False) == (128, 16)
    assert quantizer.get_scale_shape((48, 256), columnwise=True) == (256, 4)
    assert quantizer.get_columnwise_shape((3, 16, 64)) == (64, 48)
    assert quantizer.convert_shape_for_fp4((3, 64)) == (3, 32)


def test_save_order(x):
    q = cg.quantize(x, "nvfp4")
    names = ["rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv"]
    expected = [getattr(q, f"_{name}") for name in names] + [q._amax_rowwise, q._amax_columnwise]
    buffers, _ = q.prepare_for_saving()
    assert all(a is b for a, b in zip(buffers, expected, strict=True))


def test_row_scaled_amaxes(x):
    q = cg.quantize(x, "nvfp4_row_scaled")
    assert torch.equal(q._amax_rowwise, x.float().abs().amax(1))
    assert torch.equal(q._amax_columnwise, x.float().abs().amax(0))
    assert q._row_scaled_nvfp4
    assert not cg.quantizer_for("nvfp4_row_scaled").is_quantizable(x)


def test_rotation_is_columnwise_only(x):
    plain, rotated = cg.quantize(x, "nvfp4"), rht()(x)
    assert torch.equal(plain._rowwise_data, rotated._rowwise_data)
    assert not torch.equal(plain._columnwise_data, rotated._columnwise_data)
    expected = rotate(x.t().float().contiguous(), 0xD7E8).to(torch.bfloat16).float()
    assert rotated._amax_columnwise == expected.abs().max(), "the amax is taken after the rotation"
    assert rht().rht_matrix_random_sign_mask_t == 0xD7E8
    assert rht(with_random_sign_mask=False).rht_matrix_random_sign_mask_t == 0
    assert torch.allclose(rht().rht_matrix @ rht().rht_matrix.t(), torch.eye(16))


def test_columnwise_only_decodes_even_when_rotated(x):
    """Un-rotating is exact up to fp32 rounding: the rotated operand comes back."""
    for quantizer in (cg.NVFP4Quantizer(), rht(), rht(with_random_sign_mask=False)):
        both = quantizer(x)
        quantizer.set_usage(rowwise=False)
        q = quantizer(x)
        assert q._rowwise_data is None
        decoded = q.dequantize(dtype=torch.float32)
        assert decoded.shape == x.shape
        assert torch.equal(decoded, both.dequantize(dtype=torch.float32, direction=COLUMNWISE))
        plane = q.plane(COLUMNWISE)
        if plane.format.rotation is not None:
            again = rotate(decoded.t().contiguous(), plane.format.rotation)
            operand = kernels.decode_operand(plane)
            # 4 butterfly stages of fp32 sums: a few ulps of the largest of 16 values
            assert (again - operand).abs().max() <= 2**-20 * operand.abs().max()
        with cg.settings.override(strict=True), pytest.raises(NotImplementedError, match="columnwise data alone"):
            q.dequantize()


def test_rotation_needs_the_amax_after_it(x):
    with pytest.raises(ValueError, match="with_post_rht_amax"):
        cg.NVFP4Quantizer(with_rht=True)(x)
    cg.NVFP4Quantizer(with_rht=True, columnwise=False)(x)


def test_input_dtypes_give_the_same_bytes(x):
    for make in (cg.NVFP4Quantizer, rht):
        assert_same_bytes(make()(x), make()(x.float()))


def test_tiles_decode_alike_in_both_directions(x):
    q = cg.quantize(x, "nvfp4_2d")
    assert torch.equal(q.dequantize(direction=ROWWISE), q.dequantize(direction=COLUMNWISE))


def test_tiles_give_the_other_direction(x):
    whole = cg.quantize(x.view(8, 16, 256), "nvfp4_2d")
    q = whole.clone()
    q.update_usage(columnwise_usage=False)
    with cg.settings.override(strict=True):
        q.update_usage(True, True)
    assert_same_bytes(q, whole)
    q.update_usage(rowwise_usage=False)
    q.update_usage(rowwise_usage=True)
    assert_same_bytes(q, whole)
    one_d = cg.quantize(x, "nvfp4", columnwise=False)
    with pytest.raises(RuntimeError, match="columnwise usage requested"):
        one_d.update_usage(columnwise_usage=True)


def test_stochastic_rounding_follows_torch_s_generator(x):
    quantizer = cg.NVFP4Quantizer(stochastic_rounding=True)
    torch.manual_seed(7)
    first, second = quantizer(x), quantizer(x)
    torch.manual_seed(7)
    assert_same_bytes(quantizer(x), first)
    assert not torch.equal(first._rowwise_data, second._rowwise_data)
    assert torch.equal(first._rowwise_scale_inv, second._rowwise_scale_inv), "scales are never random"
    torch.manual_seed(7)
    quantizer(x)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    quantizer.set_usage(rowwise=False)
    quantizer(x)
    assert torch.equal(torch.get_rng_state(), state), "one draw, however many planes are made"


def test_nearest_rounding_draws_nothing(x):
    state = torch.get_rng_state()
    cg.quantize(x, "nvfp4")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_scale_bound_belongs_to_4over6():
    assert cg.NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448
    quantizer = cg.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256)
    q = quantizer(torch.randn(16, 32))
    assert q._nvfp4_e4m3_max == 256
    assert q._nvfp4_use_4over6


def test_constructor_with_the_arguments_of_the_field(x):
    q = rht()(x)
    names = ["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"]
    args = [getattr(q, f"_{name}") for name in names] + [q._amax_rowwise, q._amax_columnwise]
    storage = cg.NVFP4TensorStorage(*args, DType.kFloat4E2M1, rht(), False, fake_dtype=torch.bfloat16)
    for direction in cg.Direction:
        assert torch.equal(storage.dequantize(direction=direction), q.dequantize(direction=direction))
    columns = cg.NVFP4TensorStorage(None, None, *args[2:4], None, args[5], DType.kFloat4E2M1, None)
    assert columns.shape == x.shape
    with pytest.raises(ValueError, match="kFloat4E2M1"):
        cg.NVFP4TensorStorage(*args, DType.kFloat8E4M3, None)


def test_strict_mode_refuses_what_transformer_engine_refuses(x):
    with cg.settings.override(strict=True):
        with pytest.raises(RuntimeError, match="bfloat16"):
            rht()(x.float())
        rht()(x)
        row_scaled = cg.quantizer_for("nvfp4_row_scaled", rowwise=False)
        with pytest.raises(RuntimeError, match="rowwise usage"):
            row_scaled(x)
        row_scaled.set_usage(rowwise=True)
        row_scaled(x)
        with pytest.raises(RuntimeError, match="multiples of 32"):
            row_scaled(x[:16])
        with pytest.raises(ValueError, match=r"\(M\) is 8"):
            cg.quantize(x[:8], "nvfp4", columnwise=False)
    row_scaled(x[:16])
    cg.quantize(x[:8], "nvfp4", columnwise=False)
