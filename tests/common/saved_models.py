"""Tensors of every format and hybrid, small models, and what they hold, for tests of files."""

from collections.abc import Callable

import torch
from torch import nn

import crossgrain as cg

from .quantizers import PAIRS, QUANTIZERS, buffers_of, hybrid_of

SOURCES = ("original", "rowwise_dequantized")
EVERY_QUANTIZER: dict[str, Callable[[], cg.Quantizer]] = {
    **QUANTIZERS,
    **{f"{r}-{c}-{s}": (lambda r=r, c=c, s=s: hybrid_of(r, c, s)) for r, c in PAIRS for s in SOURCES},
}
USAGES = {"both": (True, True), "rowwise": (True, False), "columnwise": (False, True)}


def holder_of(name: str, x: torch.Tensor, usage: str = "both") -> nn.Module:
    """A module of torch with one quantized parameter and a plain one."""
    quantizer = EVERY_QUANTIZER[name]()
    rowwise, columnwise = USAGES[usage]
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    module = nn.Module()
    module.weight = nn.Parameter(quantizer(x.clone()))
    module.bias = nn.Parameter(torch.randn(3))
    return module


def quantized_model(recipe, *, preserve: bool = False, seed: int = 0) -> nn.Sequential:
    """Two layers whose weights are kept quantized."""
    torch.manual_seed(seed)
    with cg.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return nn.Sequential(cg.Linear(32, 64, name="first"), nn.GELU(), cg.Linear(64, 32, name="second"))


def contents(value) -> dict[str, torch.Tensor]:
    """Copies of every byte of a module, an optimizer or anything nested, by path."""
    if isinstance(value, cg.QuantizedTensor):
        return {f".{name}": buffer for name, buffer in buffers_of(value).items()}
    if isinstance(value, torch.Tensor):
        return {"": value.detach().clone()}
    if isinstance(value, torch.optim.Optimizer):
        states = [value.state.get(param, {}) for group in value.param_groups for param in group["params"]]
        return contents([states, value.state_dict()["param_groups"]])
    if hasattr(value, "state_dict"):
        return contents(value.state_dict())
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {f".{key}{path}": found for key, item in items for path, found in contents(item).items()}
    return {f"={value!r}": torch.zeros(0)}


def assert_same_contents(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    different = [key for key in mine if not torch.equal(mine[key], theirs[key])]
    assert not different, different
