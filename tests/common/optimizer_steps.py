"""Parameters and gradients for optimizer tests."""

import torch
from torch import nn

import crossgrain as cg

SHAPE = (128, 128)


def weight_value(seed=0, shape=SHAPE, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized_parameter(quantizer, seed=0, shape=SHAPE, dtype=torch.bfloat16):
    with torch.no_grad():
        return nn.Parameter(quantizer(weight_value(seed, shape, dtype)))


def gradient(step, shape=SHAPE, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + step)).to(dtype)


def run_steps(optimizer, params, steps=3):
    """Steps with the same gradients for every optimizer."""
    for step in range(steps):
        for param in params:
            param.grad = gradient(step, param.shape, param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def small_model(recipe, preserve=True, dtype=torch.bfloat16):
    with cg.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return nn.Sequential(cg.Linear(64, 96, params_dtype=dtype), nn.GELU(), cg.Linear(96, 32, params_dtype=dtype))
