"""Scales of whole tensors: Python numbers give the bits of the tensor operations they stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crossgrain as cg
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Target
from crossgrain.kernels.cpu.scalars import tensor_factor
from crossgrain.kernels.cpu.support import global_factors
from crossgrain.kernels.reference.encode import tensor_scale
from crossgrain.kernels.reference.scaling import global_scale
from crossgrain.planes import ROWWISE, empty_plane

MAGNITUDES = st.integers(0, 0x7FFFFFFF)  # every fp32 number without a sign, NaNs and infinities too


def as_fp32(bits):
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def same_bits(value, reference):
    return torch.equal(torch.tensor([value]).view(torch.int32), reference.view(1).view(torch.int32)) or (
        value != value and bool(reference.isnan())
    )


@given(
    bits=MAGNITUDES, name=st.sampled_from(["fp8", "fp8_e5m2"]), power=st.booleans(), epsilon=st.sampled_from([0, 1e-3])
)
def test_per_tensor_scales(bits, name, power, epsilon):
    encoding = Encoding(cg.get_format(name), power_of_two=power, epsilon=epsilon)
    amax = as_fp32(bits)
    plane = empty_plane(encoding.format, ROWWISE, (1, 1), device=torch.device("cpu"))
    reference = tensor_scale(Target(plane, encoding, amax=amax)).factor
    assert same_bits(tensor_factor(float(amax), encoding), reference)


@given(bits=MAGNITUDES, name=st.sampled_from(["nvfp4", "nvfp4_max256"]))
def test_global_scales(bits, name):
    fmt, amax = cg.get_format(name), as_fp32(bits)
    reference = global_scale(amax, fmt)
    encode, decode = global_factors(float(amax), fmt)
    assert same_bits(encode, reference.encode) and same_bits(decode, reference.decode)


@pytest.mark.parametrize("bits", [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_max256"])
def test_global_scales_at_the_edges(bits, name):
    fmt, amax = cg.get_format(name), as_fp32(bits)
    reference = global_scale(amax, fmt)
    encode, decode = global_factors(float(amax), fmt)
    assert same_bits(encode, reference.encode) and same_bits(decode, reference.decode)
