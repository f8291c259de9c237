"""A small GPT of plain torch modules, without dropout, as one would write it without this library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True)
class GPTConfig:
    """The size of a `GPT`.

    Examples:
        >>> cg.gpt.PRESETS["tiny"].model
        GPTConfig(layers=2, width=64, heads=2, context=64)
    """

    layers: int
    width: int
    heads: int
    context: int


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, time, channels]
        projected: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, 4 * config.width, bias=False)
        self.fc2 = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return y


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm2, self.mlp = nn.LayerNorm(config.width), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """Byte-level GPT: takes bytes [batch, time], returns the logits of the next byte [batch, time, 256].

    Examples:
        >>> model = cg.gpt.GPT(cg.gpt.GPTConfig(layers=1, width=32, heads=2, context=16))
        >>> model(torch.zeros(1, 16, dtype=torch.int64)).shape
        torch.Size([1, 16, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(BYTES, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("proj.weight", "fc2.weight")):  # what is added to the residual stream
                parameter.data.div_((2 * self.config.layers) ** 0.5)

    def forward(self, values: Tensor) -> Tensor:
        x = self.bytes(values) + self.places(torch.arange(values.shape[1], device=values.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, values: Tensor, following: Tensor) -> Tensor:
        """Cross entropy of the following bytes, in nats per byte."""
        return functional.cross_entropy(self(values).flatten(0, 1), following.flatten())
