"""A model of torchtitan whose linear layers compute by a crossgrain recipe: `crossgrain.integrations.torchtitan`.

    pip install 'crossgrain[torchtitan]'
    python examples/torchtitan_converter.py --recipe mxfp8-fwd-nvfp4-bwd --steps 5

The program trains the debug model of Llama 3 on one batch of random tokens, without torchtitan's trainer, which
wants a GPU. For the same reason attention is torch's `scaled_dot_product_attention` instead of flex attention.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from crossgrain.integrations.torchtitan import CrossgrainConverter, put


def debug_model(recipe: str | None, skip: list[str]) -> Any:
    """torchtitan's debug model of Llama 3, its linear layers by ``recipe`` (None: as torchtitan builds them)."""
    converters = [CrossgrainConverter.Config(recipe=recipe, skip=skip)] if recipe else []
    config = model_registry("debugmodel", converters=converters).model
    for _, _, parent, key in list(config.traverse(FlexAttention.Config)):
        put(parent, key, ScaledDotProductAttention.Config())
    with torch.device("meta"):
        model: Any = config.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", help="a preset, a line or a file; without it, torchtitan's own layers")
    parser.add_argument("--skip", nargs="*", default=["lm_head"], help="layers that stay in high precision")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=64, help="tokens of each of two sequences")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = debug_model(arguments.recipe, arguments.skip if arguments.recipe else [])
    tokens = torch.randint(2048, (2, arguments.length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    for step in range(arguments.steps):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
