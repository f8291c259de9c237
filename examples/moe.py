"""A mixture of experts in low precision, its experts spread over the ranks.

    python examples/moe.py
    torchrun --nproc-per-node 2 examples/moe.py

Both print the same losses. A router chooses experts for every token; tokens are sorted by expert, travel to the rank
that has it, go through two grouped layers, and travel back. Every expert sees its tokens in the same order on any
number of ranks, so it computes the same numbers. Tokens travel quantized, as the first grouped layer multiplies them.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossgrain as cg
from crossgrain.distributed import TokenExchange, count_exchanged_bytes


class Experts(nn.Module):
    """Some of the experts: two layers each, with GELU between."""

    def __init__(self, mine: range, width: int, hidden: int) -> None:
        super().__init__()
        self.up = cg.GroupedLinear(len(mine), width, hidden)
        self.down = cg.GroupedLinear(len(mine), hidden, width)
        for layer in (self.up, self.down):
            for at, expert in enumerate(mine):  # the same numbers on whichever rank the expert is
                generator = torch.Generator().manual_seed(expert)
                weight = getattr(layer, f"weight{at}")
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """``rows`` are sorted by expert; ``sizes`` says how many each has, which may be none."""
        out: Tensor = self.down(nn.functional.gelu(self.up(rows, sizes)), sizes)
        return out


class MixtureOfExperts(nn.Module):
    """Experts are dealt out to the ranks in order; the router is the same on all.

    ``sends_quantized``  tokens travel to the experts as the codes and scales that the experts multiply
    """

    def __init__(self, width: int, hidden: int, experts: int, top_k: int = 2, *, sends_quantized: bool = False) -> None:
        super().__init__()
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if experts % self.ranks:
            raise ValueError(f"{experts} experts cannot be dealt out to {self.ranks} ranks")
        self.top_k, self.here, self.sends_quantized = top_k, experts // self.ranks, sends_quantized
        self.router = nn.Linear(width, experts)
        self.experts = Experts(range(rank * self.here, (rank + 1) * self.here), width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        chances, chosen = self.router(x).softmax(-1).topk(self.top_k)
        by_expert = chosen.flatten().argsort(stable=True)
        rows = x.repeat_interleave(self.top_k, dim=0)[by_expert]
        self.counts = chosen.flatten().bincount(minlength=self.ranks * self.here)
        out = self._all_experts(rows, self.counts)[by_expert.argsort()]
        mixed: Tensor = (out.view(len(x), self.top_k, -1) * chances.unsqueeze(-1)).sum(1)
        return mixed

    def _all_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        exchange = TokenExchange(counts)
        quantizer = self.experts.up.token_quantizer() if self.sends_quantized else None
        return exchange.combine(self.experts(exchange.dispatch(rows, quantizer), exchange.sizes))


def train(
    steps: int, recipe: str, experts: int = 8, tokens: int = 128, width: int = 64, *, sends_quantized: bool = False
) -> tuple[list[float], Tensor]:
    """The losses, and how many tokens of the last step each expert was given by this rank."""
    torch.manual_seed(0)
    model = MixtureOfExperts(width, 2 * width, experts, sends_quantized=sends_quantized)
    with torch.no_grad():
        model.router.bias[1] = -100.0  # an expert that nobody asks for
    rank, ranks = (dist.get_rank(), model.ranks) if model.ranks > 1 else (0, 1)
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(width, width, generator=generator) / width**0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        x = torch.randn(tokens, width, generator=generator)
        mine = x.chunk(ranks)[rank]
        with cg.autocast(recipe=cg.recipe.as_recipe(recipe)):
            of_tokens = (model(mine) - (mine @ teacher).tanh()).square().mean(1)
        optimizer.zero_grad()
        (of_tokens.sum() / tokens).backward()
        everywhere = [of_tokens.detach()]
        if ranks > 1:
            for parameter in model.router.parameters():
                dist.all_reduce(parameter.grad)
            everywhere = [torch.empty_like(of_tokens) for _ in range(ranks)]
            dist.all_gather(everywhere, of_tokens.detach())
        optimizer.step()
        losses.append(torch.cat(everywhere).mean().item())
    return losses, model.counts


def main() -> None:
    parser = argparse.ArgumentParser(description="A mixture of experts in low precision, over any number of ranks.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--recipe", default="mxfp8, input.source: dequantized")
    parser.add_argument("--high-precision", action="store_true", help="send tokens as they are, not quantized")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    with count_exchanged_bytes() as exchanged:
        losses, counts = train(options.steps, options.recipe, sends_quantized=not options.high_precision)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.6f}")
        print("tokens of each expert, from the first rank:", counts.tolist())
        print("bytes that arrived there in a step: tokens, outputs, gradients of outputs:", exchanged.sizes[-3:])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
