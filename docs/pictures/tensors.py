"""Tensors of a model that was really trained: what the layers of the built-in small GPT multiply after 500 steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain.gpt import PRESETS, Trainer


@dataclass(frozen=True)
class Operands:
    """The three tensors that the GEMMs of one layer read, as matrices: x [M, K], W [N, K], dy [M, N]."""

    layer: str
    x: Tensor
    weight: Tensor
    dy: Tensor

    def named(self) -> dict[str, Tensor]:
        """By the names that recipes have for them."""
        return {"input": self.x, "weight": self.weight, "grad_output": self.dy}


def trained_operands(size: str = "small", steps: int | None = None, seed: int = 0) -> list[Operands]:
    """Train the GPT in fp32, run one more batch forward and backward, and keep what each linear layer read."""
    trainer = Trainer(PRESETS[size], None, seed)
    trainer.train_to(PRESETS[size].steps if steps is None else steps)
    model = trainer.model
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and "blocks" in name}

    for name, layer in layers.items():

        def keep(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            inputs[name] = arguments[0].detach().flatten(0, -2)
            output.register_hook(lambda gradient: gradients.__setitem__(name, gradient.detach().flatten(0, -2)))

        layer.register_forward_hook(keep)
    model.loss(*trainer.next_batch()).backward()
    return [Operands(name, inputs[name], layer.weight.detach(), gradients[name]) for name, layer in layers.items()]


def relative_error(x: Tensor, text: str, direction: cg.Direction) -> float:
    """||decoded - x|| / ||x|| of one plane, in the format of a text such as ``"nvfp4(rht)"``.

    Stochastic rounding is not among what is drawn here, so this is one number, not a mean over draws.
    """
    rowwise = direction == cg.ROWWISE
    quantized = cg.quantizer_for(text, rowwise=rowwise, columnwise=not rowwise)(x)
    decoded = quantized.dequantize(dtype=torch.float32, direction=direction).double()
    return float((decoded - x.double()).norm() / x.double().norm())
