"""Fused experts with the attributes that transformers gives its own, so that no test needs transformers."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional


class Experts(nn.Module):
    """Experts as transformers has them, computed in a loop."""

    def __init__(self, experts=4, hidden=32, width=48, *, gate=True, bias=False, transposed=False, top_k=2) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = experts, gate, bias, transposed
        self.config = SimpleNamespace(num_experts_per_tok=top_k)
        up = 2 * width if gate else width
        name = "gate_up_proj" if gate else "up_proj"
        for key, rows, columns in ((name, up, hidden), ("down_proj", hidden, width)):
            shape = (experts, columns, rows) if transposed else (experts, rows, columns)
            self.register_parameter(key, nn.Parameter(torch.randn(shape) / columns**0.5))
            if bias:
                self.register_parameter(f"{key}_bias", nn.Parameter(torch.randn(experts, rows)))

    act_fn = staticmethod(functional.silu)

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The loop over experts; each product is `linear`."""
        return looped(self, hidden_states, top_k_index, top_k_weights, self.linear)

    def linear(self, name: str, expert: int, x: Tensor) -> Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return functional.linear(x, weight.t() if self.is_transposed else weight, bias)


def looped(experts, hidden, index, weights, linear) -> Tensor:
    """Experts one after the other, with ``linear(name, expert, x)`` for each product."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    places = hidden.new_zeros(index.numel(), hidden.shape[-1])
    for expert in range(experts.num_experts):
        rows = (index.reshape(-1) == expert).nonzero().flatten()
        if len(rows):
            x = linear(up, expert, hidden[rows // index.shape[-1]])
            x = linear("down_proj", expert, experts._apply_gate(x) if experts.has_gate else experts.act_fn(x))
            places = places.index_copy(0, rows, x * weights.reshape(-1)[rows, None])
    return places.view(len(hidden), index.shape[-1], -1).sum(1)


def routed(tokens: int, experts: int, top_k: int = 2) -> tuple[Tensor, Tensor]:
    """Experts and weights of tokens; the last expert gets none."""
    chosen = torch.rand(tokens, experts - 1).topk(top_k).indices
    return chosen, torch.rand(tokens, top_k)
