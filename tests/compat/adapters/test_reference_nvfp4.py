"""Products and rotations of the reference quantizer of NVFP4, as Transformer Engine's exact tests call them."""

import pytest
import torch

from crossgrain.compat import transformer_engine
from crossgrain.kernels.reference.hadamard import rotation_matrix

te = transformer_engine.pytorch
NVFP4QuantizerRef = te.custom_recipes.reference_nvfp4.NVFP4QuantizerRef
WGRAD = te.custom_recipes.gemm.GEMMType.WGRAD


def product(by, x, w, **options):
    given = {"qx": x.data, "qw": w.data, "sx": x.scale, "sw": w.scale, "qresult_x": x, "qresult_w": w}
    return by.qgemm(**{**given, "m_params": None, "out_dtype": torch.float32, **options})


@pytest.mark.parametrize("options", [{}, {"row_scaled_nvfp4": True}, {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}])
def test_a_product_of_codes_is_that_of_the_decoded_numbers(options):
    """In fp32, of 64 numbers around 1; the order of sums and where the amaxes are multiplied differ."""
    by = NVFP4QuantizerRef(**options)
    x, w = by.quantize(torch.randn(32, 64)), NVFP4QuantizerRef().quantize(torch.randn(48, 64))
    exact = x.dequantize(dtype=torch.float64) @ w.dequantize(dtype=torch.float64).T
    torch.testing.assert_close(product(by, x, w).double(), exact, rtol=1e-5, atol=1e-4)
    out = torch.randn(32, 48)
    before = out.clone()
    added = product(by, x, w, out=out, accumulate=True)
    torch.testing.assert_close(added, product(by, x, w) + out, rtol=1e-6, atol=1e-5)
    assert torch.equal(out, before)


def test_wgrad_takes_the_amaxes_of_columns():
    by = NVFP4QuantizerRef(with_rht=True)
    x, dy = by.quantize(torch.randn(32, 64)), by.quantize(torch.randn(32, 48))
    codes = {"qx": dy.data_t, "qw": x.data_t, "sx": dy.scale_t, "sw": x.scale_t}
    made = product(by, dy, x, **codes, gemm_type=WGRAD)
    plain = te.cpp_extensions.general_gemm(x, dy, out_dtype=torch.float32, layout="NT")[0]
    torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-4)


def test_products_that_lack_something_are_refused():
    by = NVFP4QuantizerRef()
    x = by.quantize(torch.randn(32, 64))
    with pytest.raises(ValueError, match="qresult_x and qresult_w are needed"):
        product(by, x, x, qresult_w=None)
    with pytest.raises(ValueError, match="give both, or neither"):
        product(by, x, x, accumulate=True)
    with pytest.raises(ValueError, match="give both, or neither"):
        product(by, x, x, out=torch.zeros(32, 32))
    rows = NVFP4QuantizerRef(columnwise=False).quantize(torch.randn(32, 64))
    with pytest.raises(ValueError, match="has no columnwise data"):
        product(by, rows, x, gemm_type=WGRAD)


def test_the_rotation_is_that_of_the_columns():
    x = torch.randn(4, 32)
    by = NVFP4QuantizerRef(with_rht=True)
    matrix = rotation_matrix(by.rht_matrix_random_sign_mask_t)
    torch.testing.assert_close(by._apply_rht(x), (x.view(-1, 16) @ matrix).view(4, 32), rtol=1e-6, atol=1e-6)
    assert by._apply_rht(x.bfloat16()).dtype == torch.bfloat16
    assert NVFP4QuantizerRef()._apply_rht(x) is x
    with pytest.raises(ValueError, match="rotated in blocks of 16"):
        by._apply_rht(torch.randn(4, 24))
