"""Observe the inputs of quantized layers, for layouts that store a scale for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..linear.padding import known_format
from ..nn.norm_first import NormFirst
from ..planes import ROWWISE
from ..quantizers.float8 import Float8Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..recipe import Recipe, autocast
from ..runtime.random_numbers import forked_generators
from ..tensor import QuantizedTensor
from .walk import ExportedWeight

Batches = Iterable[Any]


def observed_amaxes(model: nn.Module, weights: Mapping[str, ExportedWeight], inputs: Batches) -> dict[str, float]:
    """The largest magnitude of the input of each quantized layer, by name of the weight.

    The model runs in high precision and in evaluation mode, so that histories and random states stay what they are.

    Args:
        model: the model.
        weights: the quantized weights by name.
        inputs: batches; a tuple or list is passed as positional arguments, a mapping by name, everything else as the
            only argument.

    Raises:
        ValueError: a layer was not reached, saw NaNs or infinities, or computes the input of its GEMM itself.
    """
    inner = [name for name, weight in weights.items() if isinstance(weight.module, NormFirst)]
    if inner:
        raise ValueError(
            f"{inner[0]}: the input of this GEMM is computed inside the layer (a norm comes first) and cannot be "
            "observed. Export without inputs="
        )
    seen: dict[int, float] = {}
    with _watching({id(w.module): w.module for w in weights.values()}, seen), _evaluating(model):
        for batch in inputs:
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
    for name, weight in weights.items():
        amax = seen.get(id(weight.module))
        if amax is None or not math.isfinite(amax):
            what = "none of the inputs reached this layer" if amax is None else "its inputs hold NaNs or infinities"
            raise ValueError(f"{name}: no scale for the input can be written: {what}. Pass other inputs=")
    return {name: seen[id(weight.module)] for name, weight in weights.items()}


@contextmanager
def _watching(modules: Mapping[int, Any], seen: dict[int, float]) -> Iterator[None]:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
        if isinstance(x, QuantizedTensor):
            x = x.dequantize()
        if isinstance(x, Tensor) and x.numel():
            amax = math.inf if not bool(x.isfinite().all()) else kernels.amax(x.detach()).item()
            seen[id(module)] = max(seen.get(id(module), 0.0), amax)

    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), forked_generators(), autocast(enabled=False):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def remembered_amaxes(weights: Mapping[str, ExportedWeight], recipe: Recipe | None) -> dict[str, float]:
    """The amax that delayed scaling uses for the input of each layer, by name of the weight, where there is one."""
    found: dict[str, float] = {}
    for name, weight in weights.items():
        bound = weight.module.bound_recipe or recipe
        if bound is None:
            continue
        built = weight.module._build_quantizers(bound, backward=False)
        quantizer = weight.module._gemm_operands(built.quantizers)[weight.part.gemm]["input"]
        row = quantizer.child(ROWWISE) if isinstance(quantizer, HybridQuantizer) else quantizer
        fmt = known_format(quantizer, ROWWISE)
        if isinstance(row, Float8Quantizer) and fmt is not None and row.amax.numel() and bool(row.scale != 1.0):
            found[name] = fmt.target / row.scale.item()
    return found
