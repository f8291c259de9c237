"""Measure the error of each GEMM of a recipe, on the tensors of a model that was trained in fp32.

Every linear layer gets the input and the output gradient that it has in fp32. So y shows the error of fprop alone, dx
that of dgrad and dW that of wgrad.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import convert
from ..gemm.operands import GEMMS
from ..gpt.model import GPT
from ..recipe import Recipe

Errors = dict[str, float]  # by GEMM, relative (Frobenius)


class Seen:
    """Records the input and the output gradient of a layer in one forward and backward pass."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.x = self.dy = torch.empty(0)
        self.hook = layer.register_forward_hook(self._forward)

    def _forward(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.x = inputs[0].detach()
        output.register_hook(self._backward)

    def _backward(self, dy: Tensor) -> None:
        self.dy = dy.detach()


def tensors_of_layers(model: GPT, values: Tensor, following: Tensor) -> dict[str, Seen]:
    """Input, weight and output gradient of every linear layer of a plain model, on one batch."""
    seen = {path: Seen(module) for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    gradients = [parameter.grad for parameter in model.parameters()]
    model.loss(values, following).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    for one in seen.values():
        one.hook.remove()
    return seen


def gemm_errors(model: GPT, recipe: Recipe, seen: dict[str, Seen]) -> dict[str, Errors]:
    """Return the relative errors by layer and GEMM. ``model`` is the model that ``seen`` was recorded on, unchanged."""
    quantized = copy.deepcopy(model)
    convert(quantized, recipe)
    found = {}
    for path, one in seen.items():
        exact = _products(one.layer, one)
        layer = quantized.get_submodule(path)
        _products(layer, one)  # a recipe with histories has learned its scales after one step
        products = _products(layer, one)
        found[path] = {gemm: relative_error(products[gemm], exact[gemm]) for gemm in GEMMS}
    return found


def mean_errors(by_layer: dict[str, Errors]) -> Errors:
    """The mean error over all layers, by GEMM."""
    return {gemm: statistics.mean(errors[gemm] for errors in by_layer.values()) for gemm in GEMMS}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference, relative to the norm of ``exact``."""
    return float((found - exact).norm() / exact.norm())


def _products(layer: Any, seen: Seen) -> dict[str, Tensor]:
    x = seen.x.clone().requires_grad_()
    y = layer(x)
    dx, dw = torch.autograd.grad(y, [x, layer.weight], seen.dy)
    return {"fprop": y.detach(), "dgrad": dx, "wgrad": dw}
