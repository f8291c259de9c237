"""What each GEMM costs the gradients: a small model is trained in fp32, then one GEMM at a time is quantized.

A linear layer runs fprop, dgrad and wgrad, and each reads one direction of two tensors. A factory that gives a
format to the operands of some GEMMs, and identity to those of the others, quantizes just these GEMMs in all layers.
The gradients are compared with those of fp32 on the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import crossgrain as cg
from crossgrain.recipe import CustomRecipe

CONTEXT, CHANNELS, HIDDEN, BATCH, STEPS = 16, 32, 256, 256, 60
FORMATS = ("nvfp4", "mxfp8", "fp8")
GEMMS = ("fprop", "dgrad", "wgrad")

# The GEMM that reads the rows of a tensor, and the one that reads its columns.
READERS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}


class Gradients(NamedTuple):
    weights: Tensor  # of all linear layers, one after the other
    inputs: Tensor  # of the first layer's input


def factory(role: cg.QuantizerRole | None, name: str, gemms: Sequence[str]) -> cg.Quantizer:
    """The format ``name`` wherever one of ``gemms`` reads; both operands of a GEMM get the same answer."""
    if role is None or role.tensor_type not in READERS:
        return cg.IdentityQuantizer()
    row, column = (
        cg.quantizer_for(name) if gemm in gemms else cg.IdentityQuantizer() for gemm in READERS[role.tensor_type]
    )
    return cg.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)


class NextByte(nn.Module):
    """Guesses a byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, CHANNELS)
        self.layers = nn.ModuleList(
            cg.Linear(size, out) for size, out in ((CONTEXT * CHANNELS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 256))
        )

    def embed(self, text: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(text).flatten(1)
        return embedded

    def forward(self, embedded: Tensor) -> Tensor:
        x = embedded
        for layer in self.layers[:-1]:
            x = functional.gelu(layer(x))
        logits: Tensor = self.layers[-1](x)
        return logits


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Some places of the text: the bytes before each, and the byte there."""
    places = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    windows = text[places + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


def train(model: NextByte, text: Tensor, generator: torch.Generator) -> float:
    """Some steps in fp32; the loss of the last one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        before, target = batch(text, generator)
        loss = functional.cross_entropy(model(model.embed(before)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def gradients(model: NextByte, before: Tensor, target: Tensor, recipe: CustomRecipe | None) -> Gradients:
    weights = [parameter for parameter in model.layers.parameters() if parameter.dim() == 2]
    embedded = model.embed(before).detach().requires_grad_()
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        logits = model(embedded)
    *found, of_input = torch.autograd.grad(functional.cross_entropy(logits, target), [*weights, embedded])
    return Gradients(torch.cat([gradient.flatten() for gradient in found]), of_input.flatten())


def compare(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Relative error and cosine."""
    error = (found - exact).norm() / exact.norm()
    return error.item(), functional.cosine_similarity(found, exact, dim=0).item()


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    model = NextByte()
    loss = train(model, text, generator)
    before, target = batch(text, generator)
    exact = gradients(model, before, target, None)

    print(f"Next byte of Python's documentation: {loss:.2f} nats after {STEPS} steps in fp32.")
    print("Gradients of one batch against fp32, with the GEMMs of all layers quantized as said.\n")
    head = f"{'format':<8} {'GEMMs':<8} {'weights: error':>14} {'cosine':>8} {'inputs: error':>15} {'cosine':>8}"
    print(head)
    print("-" * len(head))
    for name in FORMATS:
        for label, gemms in (*((gemm, (gemm,)) for gemm in GEMMS), ("all", GEMMS)):
            recipe = CustomRecipe(qfactory=partial(factory, name=name, gemms=gemms))
            found = gradients(model, before, target, recipe)
            (error, cosine), (input_error, input_cosine) = map(compare, found, exact)
            print(f"{name:<8} {label:<8} {error:>14.4f} {cosine:>8.4f} {input_error:>15.4f} {input_cosine:>8.4f}")


if __name__ == "__main__":
    main()
