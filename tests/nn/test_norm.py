"""LayerNorm and RMSNorm."""

import pickle

import pytest
import torch
from torch import nn

import crossgrain as cg

TORCH = {cg.LayerNorm: nn.LayerNorm, cg.RMSNorm: nn.RMSNorm}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(24,), (3, 8)])
@pytest.mark.parametrize("norm", TORCH)
def test_as_in_torch(norm, shape, zero_centered):
    """Value and gradients; a zero-centered weight is the other one minus one."""
    theirs = TORCH[norm](shape, eps=1e-3, dtype=torch.float64)
    mine = norm(shape, eps=1e-3, params_dtype=torch.float64, zero_centered_gamma=zero_centered)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            nn.init.normal_(parameter)
            getattr(mine, name).copy_(parameter - int(name == "weight" and zero_centered))
    x = torch.randn(5, *shape, dtype=torch.float64)
    results = []
    for module in (mine, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(torch.arange(y.numel(), dtype=torch.float64).reshape(y.shape).sin())
        results.append((y, leaf.grad, *(parameter.grad for parameter in module.parameters())))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("norm", TORCH)
def test_gradients(norm):
    module = norm(6, params_dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))


@pytest.mark.parametrize("norm", TORCH)
def test_statistics_are_in_fp32(norm):
    """bf16 in, bf16 out, parameters in fp32, and the rounding of one bf16 number between them."""
    x = (100 + torch.randn(3, 256)).bfloat16().requires_grad_()
    module = norm(256)
    y = module(x)
    assert y.dtype == torch.bfloat16 and module.weight.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and module.weight.grad.dtype == torch.float32
    exact = module.double()(x.detach().double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)


def test_torch_autocast_sets_the_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cg.RMSNorm(8)(torch.randn(2, 8)).dtype == torch.bfloat16


def test_initial_values_and_options():
    assert (cg.LayerNorm(4).weight == 1).all() and (cg.LayerNorm(4).bias == 0).all()
    assert (cg.RMSNorm(4, zero_centered_gamma=True).weight == 0).all() and cg.RMSNorm(4).bias is None
    assert cg.LayerNorm(hidden_size=4).normalized_shape == (4,)
    assert set(cg.RMSNorm(4).state_dict()) == {"weight"}
    with pytest.raises(ValueError, match="needs one of normalized_shape and hidden_size"):
        cg.LayerNorm()
    with pytest.raises(ValueError, match=r"must be \[4\], got an input of shape \[2, 5\]"):
        cg.LayerNorm(4)(torch.randn(2, 5))


@pytest.mark.parametrize("norm", TORCH)
def test_sequence_parallel_marks_parameters(norm):
    module = norm(4, sequence_parallel=True)
    assert module.sequence_parallel and all(parameter.sequence_parallel for parameter in module.parameters())
    assert not hasattr(norm(4).weight, "sequence_parallel")


def test_meta_parameters_get_memory():
    module = cg.LayerNorm(4, device="meta")
    assert module.weight.is_meta
    module.reset_parameters()
    assert torch.equal(module(torch.ones(1, 4)), torch.zeros(1, 4))


def test_quantized_input_and_pickling():
    x = torch.randn(32, 32)
    module = pickle.loads(pickle.dumps(cg.RMSNorm(32)))
    quantized = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)(x)
    assert torch.equal(module(quantized), module(quantized.dequantize()))
