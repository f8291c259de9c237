"""Recipes by name, and the comparisons that all tests of operations share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    factories,
    zoo,
)


def _twins(factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """hybrid(F, F) of another factory."""

    def factory_of_twins(role: Any) -> Any:
        return cg.HybridQuantizer(rowwise_quantizer=factory(role), columnwise_quantizer=factory(role))

    return factory_of_twins


RECIPES: dict[str, Callable[[], Recipe]] = {
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "fp8": Float8CurrentScaling,
    "fp8_delayed": DelayedScaling,
    "fp8_block": Float8BlockScaling,
    "hybrid_mxfp8_nvfp4": lambda: CustomRecipe(qfactory=zoo.mxfp8_fwd_nvfp4_bwd_factory),
    "hybrid_identity": lambda: CustomRecipe(qfactory=zoo.mxfp8_fwd_high_precision_bwd_factory),
}

# Each plain factory and hybrid(F, F) of it: the same bits.
TWINS = {
    name: (lambda f=factory: CustomRecipe(qfactory=f), lambda f=factory: CustomRecipe(qfactory=_twins(f)))
    for name, factory in {
        "mxfp8": factories.mxfp8_factory,
        "nvfp4": factories.nvfp4_factory,
        "fp8": factories.current_scaling_factory,
        "fp8_block": factories.float8_block_scaling_factory,
    }.items()
}


@contextmanager
def quantized(recipe: Recipe | None) -> Iterator[None]:
    """An autocast, or nothing."""
    if recipe is None:
        yield
        return
    with cg.autocast(recipe=recipe):
        yield


def grads_of(run: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor, recipe: Recipe | None = None) -> Any:
    """The output and the gradients of ``tensors``, with the same random numbers each time."""
    torch.manual_seed(5)
    with quantized(recipe):
        y = run()
    return [y.detach(), *torch.autograd.grad(y, tensors, dy.to(y.dtype), allow_unused=True)]


def assert_same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> None:
    """Bit for bit."""
    assert len(a) == len(b)
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        assert (one is None) == (other is None), index
        if one is not None and other is not None:
            assert one.dtype == other.dtype and torch.equal(one, other), f"number {index} differs"


def assert_close(a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype) -> None:
    """To the rounding of ``dtype``: results are rounded once, sums over up to a thousand terms are in fp32."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float64: 1e-10}[dtype]
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)
