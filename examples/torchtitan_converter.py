"""A model converter for torchtitan: its linear layers compute by a crossgrain recipe.

    pip install crossgrain torchtitan triton
    python examples/torchtitan_converter.py --recipe mxfp8-fwd-nvfp4-bwd --steps 5

torchtitan describes a model by a tree of configs, and converters replace some of them before the model is built.
`CrossgrainConverter` replaces the configs of linear layers. In a torchtitan configuration:

    model_registry("debugmodel", converters=[CrossgrainConverter.Config(recipe="mxfp8", skip=["lm_head"])])

The program trains the debug model of Llama 3 on one batch of random tokens, without torchtitan's trainer, which
wants a GPU. For the same reason attention is torch's `scaled_dot_product_attention` instead of flex attention.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.module import Module

import crossgrain


class CrossgrainLinear(crossgrain.Linear, Module):
    """A linear layer of torchtitan that is bound to a recipe, None: high precision."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: Any = None
        name: str = ""

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias, name=config.name)
        self.bound_recipe = config.recipe


class CrossgrainConverter(QuantizationConverter):
    """Every `Linear.Config` of the tree becomes a `CrossgrainLinear.Config`, but those of layers to skip."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = "mxfp8"
        """A preset's name, a line or a file, as for `crossgrain.convert`."""
        skip: list[str] = field(default_factory=list)
        """Layers that stay as they are: patterns and blocks, as for `crossgrain.convert`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        if crossgrain.recipe.as_recipe(config.recipe).may_keep_histories():
            raise ValueError(
                f"recipe {config.recipe!r} learns scales from step to step, and needs crossgrain.autocast around each"
            )

    def convert(self, model_config: Any) -> Any:
        places = list(model_config.traverse(Linear.Config))
        if type(model_config) is Linear.Config or not places:
            raise ValueError(f"{type(model_config).__qualname__} is not the config of a model with linear layers")
        for path, old, parent, key in places:
            if type(old) is not Linear.Config:
                raise TypeError(f"{path} is a {type(old).__qualname__}, which computes in its own way; skip it")
            _put(parent, key, CrossgrainLinear.Config(**_values(old), name=path))
        # A model without memory tells which layers a pattern means, and what "first 2 blocks" are.
        with torch.device("meta"):
            report = crossgrain.convert(model_config.build(), self.config.recipe, skip=self.config.skip)
        for path, old, parent, key in places:
            if path in report.left:
                _put(parent, key, old)
            else:
                _put(parent, key, CrossgrainLinear.Config(**_values(old), name=path, recipe=report.recipe))
        return model_config


def _values(config: Linear.Config) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config)}


def _put(parent: Any, key: Any, value: Any) -> None:
    if isinstance(parent, list):
        parent[key] = value
    else:
        setattr(parent, key, value)


def debug_model(recipe: str | None, skip: list[str]) -> Any:
    """torchtitan's debug model of Llama 3, its linear layers by ``recipe`` (None: as torchtitan builds them)."""
    converters = [CrossgrainConverter.Config(recipe=recipe, skip=skip)] if recipe else []
    config = model_registry("debugmodel", converters=converters).model
    for _, _, parent, key in list(config.traverse(FlexAttention.Config)):
        _put(parent, key, ScaledDotProductAttention.Config())
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
