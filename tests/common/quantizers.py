"""Every quantizer with every option that changes what is stored, by name, for parametrized tests."""

from collections.abc import Callable

import torch

import crossgrain as cg
from crossgrain import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2

QUANTIZERS: dict[str, Callable[[], cg.Quantizer]] = {
    **{fmt.name: (lambda name=fmt.name: cg.quantizer_for(name)) for fmt in cg.formats.formats()},
    "fp8_pow2_eps": lambda: cg.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True, amax_epsilon=1e-2),
    "fp8_delayed": lambda: cg.Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), E4M3),
    "fp8_block_fp32_scales": lambda: cg.Float8BlockQuantizer(
        E5M2, rowwise=True, columnwise=True, force_pow_2_scales=False, block_scaling_dim=1
    ),
    "nvfp4_rht": lambda: cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4_rht_sr": lambda: cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
    "nvfp4_4over6_mse": lambda: cg.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE"),
    "mxfp4_sr": lambda: cg.FormatQuantizer("mxfp4", stochastic_rounding=True),
    "identity_bf16": lambda: cg.IdentityQuantizer(dtype=torch.bfloat16),
}


def dtype_of(quantizer: cg.Quantizer, x: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of what a quantizer makes of a tensor of dtype ``x``: only an identity may have one of its own."""
    own = quantizer.dtype if isinstance(quantizer, cg.IdentityQuantizer) else None
    return x if own is None else own


def buffers_of(tensor: cg.QuantizedTensorStorage) -> dict[str, torch.Tensor]:
    """Copies of all buffers by name."""
    return {name: buffer.clone() for name, buffer in tensor._buffers()}


def assert_same_bytes(a: cg.QuantizedTensorStorage, b: cg.QuantizedTensorStorage) -> None:
    """Both hold the same planes, bit for bit, padding aside."""
    assert a.get_usages() == b.get_usages()
    assert a.shape == b.shape
    for mine, theirs in zip(a.planes(), b.planes(), strict=True):
        assert mine.format == theirs.format
        assert not mine.stale
        assert not theirs.stale
        assert torch.equal(mine.operand_codes(), theirs.operand_codes()), f"{mine.direction.value} codes differ"
        if mine.scale is not None:
            assert torch.equal(mine.operand_scales(), theirs.operand_scales()), f"{mine.direction.value} scales differ"
        if mine.amax is not None:
            assert torch.equal(mine.amax, theirs.amax), f"{mine.direction.value} amaxes differ"


def hybrid_of(row: str, column: str, source: str = "original") -> cg.HybridQuantizer:
    """A hybrid of two entries of `QUANTIZERS`."""
    return cg.HybridQuantizer(
        rowwise_quantizer=QUANTIZERS[row](), columnwise_quantizer=QUANTIZERS[column](), columnwise_source=source
    )


# Per-tensor, block, two-level, rotated, stochastic, identity: each on both sides of some pair.
PAIRS = [
    ("mxfp8", "nvfp4_rht"),
    ("nvfp4", "mxfp8"),
    ("fp8", "mxfp8_2d"),
    ("mxfp8", "fp8_e5m2"),
    ("fp8_block", "nvfp4_rht_sr"),
    ("nvfp4_2d", "fp8_block_2d"),
    ("fp8_delayed", "mxfp4_sr"),
    ("mxfp8", "identity"),
    ("identity", "nvfp4_row_scaled"),
    ("identity", "identity_bf16"),
]
