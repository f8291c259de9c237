"""Quantize a matrix in two directions, look at what is stored, and read it back."""

import torch

import crossgrain as cg

torch.manual_seed(0)
x = torch.randn(256, 512, dtype=torch.bfloat16)

# One tensor, two planes: rowwise for the GEMMs that sum over K, columnwise for those that sum over M.
q = cg.quantize(x, "mxfp8")
print("stored directions:", q.get_usages())

for direction in (cg.ROWWISE, cg.COLUMNWISE):
    plane = q.plane(direction)
    assert plane is not None
    error = (q.dequantize(direction=direction) - x).norm() / x.norm()
    print(f"{direction.value}: {plane.format.bits_per_element} bits per element, relative error {error:.4f}")

# A direction that no GEMM reads need not be made.
gradient_only = cg.quantize(x, "nvfp4", rowwise=False)
assert gradient_only.plane(cg.ROWWISE) is None

# Quantizers have the options that a format name leaves at their defaults.
quantizer = cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True)
print("NVFP4, rotated, stochastic rounding:", tuple(quantizer(x).dequantize().shape))
