"""Models of transformers without weights, from their configurations."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import typer
from torch import nn


def model_without_weights(config: str) -> nn.Module:
    """Build a model of transformers on the meta device.

    Args:
        config: a ``config.json``, the directory it is in, or the name of a model on the hub.

    Raises:
        typer.BadParameter: transformers is not installed, or there is no such configuration.
    """
    try:
        import transformers
    except ImportError as error:
        raise typer.BadParameter("--hf needs transformers: pip install 'crossgrain[hf]'") from error
    if os.sep in config and config.count("/") != 1 and not os.path.exists(config):
        raise typer.BadParameter(f"--hf {config}: there is no such file or directory")
    try:
        loaded = transformers.AutoConfig.from_pretrained(config)
        cls = _class_of(loaded, transformers)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers, about models that are not trained
            model: nn.Module = cls(loaded)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise typer.BadParameter(f"--hf {config}: {error}") from error
    return model


def _class_of(config: Any, transformers: Any) -> Any:
    """The class that the configuration names, or else the language model of its type, or its base model."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise ValueError(f"transformers has no model for {type(config).__name__}")
