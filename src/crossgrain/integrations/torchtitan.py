"""`CrossgrainConverter`, a model converter for torchtitan: its linear layers compute by a crossgrain recipe.

torchtitan describes a model by a tree of configs, and converters replace some of them before the model is built.
`CrossgrainConverter` replaces the configs of linear layers. In a torchtitan configuration:

    model_registry("debugmodel", converters=[CrossgrainConverter.Config(recipe="mxfp8", skip=["lm_head"])])
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..convert import convert
from ..nn import Linear as QuantizedLinear
from ..recipe import as_recipe
from .needs import not_installed

try:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common.linear import Linear
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise not_installed("torchtitan", "torchtitan", error) from error


class CrossgrainLinear(QuantizedLinear, Module):
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
        if as_recipe(config.recipe).may_keep_histories():
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
            put(parent, key, CrossgrainLinear.Config(**_values(old), name=path))
        # A model without memory tells which layers a pattern means, and what "first 2 blocks" are.
        with torch.device("meta"):
            report = convert(model_config.build(), self.config.recipe, skip=self.config.skip)
        for path, old, parent, key in places:
            if path in report.left:
                put(parent, key, old)
            else:
                put(parent, key, CrossgrainLinear.Config(**_values(old), name=path, recipe=report.recipe))
        return model_config


def _values(config: Linear.Config) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config)}


def put(parent: Any, key: Any, value: Any) -> None:
    """Replace one config of the tree, at ``key`` of ``parent``, as ``traverse`` gives them."""
    if isinstance(parent, list):
        parent[key] = value
    else:
        setattr(parent, key, value)
