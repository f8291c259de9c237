"""What the layers and the optimizer of a training run must hold: plain tensors, and optimizers of plain torch.

A weight is a plain tensor, or, if it is kept quantized, the arrays of a `TensorModel`. Each parameter has a twin, which
a torch optimizer updates with the same gradients. Where the library keeps a float32 master, the twin is that master;
and the parameter is, bit for bit, the twin rounded to the dtype, or encoded by the transcription.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.optim import with_masters

from .module_formats import LayerFormats, operand, padded
from .tensor_model import COLUMN, ROW, TensorModel
from .transcription import Array


class Cache(NamedTuple):
    """The quantized copy that microbatches share: of which numbers, after which write, and with columns or not."""

    weight: Tensor
    writes: int
    columnwise: bool


@dataclass
class LayerModel:
    """One linear layer.

    Attributes:
        weight: the weight; a `TensorModel` if it is kept quantized.
        bias: the bias.
        writes: how often the weight was written.
        grads: the gradients of weight and bias; what backward has added was compared with the model before.
        cache: the cached copy of the weight.
        built: the recipe that the layer ran with last.
        preserved: the initial value that a master will start from, and the count of writes at that time.
    """

    weight: Tensor | TensorModel
    bias: Tensor | None
    writes: int = 0
    grads: dict[str, Tensor | None] = field(default_factory=lambda: dict.fromkeys(("weight", "bias")))
    cache: Cache | None = None
    built: str | None = None
    preserved: tuple[Tensor, int] | None = None

    @property
    def kept(self) -> bool:
        return isinstance(self.weight, TensorModel)

    def parameters(self) -> list[str]:
        return ["weight"] if self.bias is None else ["weight", "bias"]

    def plain(self, name: str) -> Tensor:
        """A parameter in its dtype; decoded if it is kept quantized."""
        if name == "bias":
            assert self.bias is not None
            return self.bias
        return self.weight.decoded() if isinstance(self.weight, TensorModel) else self.weight

    def needs_master(self, name: str) -> bool:
        return (name == "weight" and self.kept) or self.plain(name).dtype != torch.float32

    def write(self, name: str, values: Tensor) -> None:
        if name == "bias":
            assert self.bias is not None
            self.bias = values.to(self.bias.dtype).clone()
            return
        self.writes += 1
        if isinstance(self.weight, TensorModel):
            self.weight.write(values)
        else:
            self.weight = values.to(self.weight.dtype).clone()

    def start_of_master(self, name: str) -> Tensor:
        """What a new master is made from; a preserved initial value is dropped."""
        if name == "bias" or not isinstance(self.weight, TensorModel):
            return self.plain(name).float().clone()
        preserved, first = self.preserved_value(), self.weight.first()
        self.preserved = None
        assert first is not None
        return torch.from_numpy(first.decoded().copy()) if preserved is None else preserved.float().clone()

    def preserved_value(self) -> Tensor | None:
        """The preserved initial value, unless the weight has other numbers by now."""
        if self.preserved is None:
            return None
        value, writes = self.preserved
        assert isinstance(self.weight, TensorModel)
        again = self.weight.clone()
        again.write(value)
        same = np.array_equal(again.decoded().float().numpy(), self.weight.decoded().float().numpy())
        return value if writes == self.writes or same else None

    # ---- running ---------------------------------------------------------------------------------------------

    def run_with(self, recipe: str | None) -> None:
        """Another recipe than before drops the cached copy."""
        if recipe not in (None, self.built):
            self.built, self.cache = recipe, None

    def weight_of_call(self, first: bool | None, columnwise: bool) -> tuple[Any, bool]:
        """The weight that a call must use, and whether it is a cached copy that is old by now."""
        if isinstance(self.weight, TensorModel) or first is None:
            return self.weight, False
        if first or self.cache is None or (columnwise and not self.cache.columnwise):
            columnwise = columnwise or (self.cache is not None and self.cache.columnwise)
            self.cache = Cache(self.weight, self.writes, columnwise)
        return self.cache.weight, self.cache.writes != self.writes

    def copied(self) -> LayerModel:
        """A layer of its own with the same parameters. Torch copies plain parameters without their gradients."""
        new = LayerModel(self.weight, self.bias, self.writes, preserved=self.preserved)
        if isinstance(self.weight, TensorModel):
            new.weight = self.weight.clone()
            new.grads["weight"] = self.grads["weight"]
        return new


def weight_numbers(weight: Tensor | TensorModel, formats: LayerFormats, columnwise: bool, marks: bool) -> Array:
    """The numbers of a weight that fprop (rowwise) or dgrad (columnwise) reads."""
    if isinstance(weight, TensorModel):
        return padded(weight.planes[COLUMN if columnwise else ROW].decoded())
    return operand(weight, formats.w, "w" in formats.derived, columnwise, marks)


# ---- optimizers ----------------------------------------------------------------------------------------------

Make = Callable[[Any], Any]


class OptimizerKind(NamedTuple):
    """How an optimizer is made, the plain one that it must agree with, and when it makes masters."""

    make: Make
    plain: Make
    masters: str = ""  # "first gradient" of the parameter, or "first step" of the optimizer
    group_count: bool = False  # all parameters share one count of steps


OPTIMIZERS = {
    "AdamW": OptimizerKind(*[lambda p: torch.optim.AdamW(p, lr=0.02)] * 2),
    "SGD": OptimizerKind(*[lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)] * 2),
    "FusedAdam": OptimizerKind(
        lambda p: cg.optim.FusedAdam(p, lr=0.02, weight_decay=0.01, master_weights=True),
        lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.01, fused=True),
        "first gradient",
        group_count=True,
    ),
    "FusedSGD": OptimizerKind(
        lambda p: cg.optim.FusedSGD(p, lr=0.02, momentum=0.9, master_weights=True),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True),
        "first gradient",
    ),
    "with_masters(AdamW)": OptimizerKind(
        lambda p: with_masters(torch.optim.AdamW, p, lr=0.02), lambda p: torch.optim.AdamW(p, lr=0.02), "first step"
    ),
    "with_masters(SGD)": OptimizerKind(
        lambda p: with_masters(torch.optim.SGD, p, lr=0.02, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        "first step",
    ),
    "with_masters(RMSprop)": OptimizerKind(
        lambda p: with_masters(torch.optim.RMSprop, p, lr=0.01), lambda p: torch.optim.RMSprop(p, lr=0.01), "first step"
    ),
}


@dataclass
class Twin:
    """What the optimizer keeps of one parameter."""

    master: Tensor | None = None
    moments: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerModel:
    """The states of all parameters, by path."""

    kind: OptimizerKind
    twins: dict[str, Twin] = field(default_factory=dict)
    count: int = 0

    def step(self, layers: list[LayerModel]) -> None:
        self.count += 1
        for index, layer in enumerate(layers):
            for name in layer.parameters():
                grad, path = layer.grads[name], f"l{index}.{name}"
                if grad is not None or (self.kind.masters == "first step" and layer.needs_master(name)):
                    self._step_one(layer, name, self.twins.setdefault(path, Twin()), grad)

    def _step_one(self, layer: LayerModel, name: str, twin: Twin, grad: Tensor | None) -> None:
        if not (self.kind.masters and layer.needs_master(name)):
            value = layer.plain(name).clone()
        else:
            if twin.master is None:
                twin.master = layer.start_of_master(name)
            value = twin.master
        if grad is None:
            return
        value = torch.nn.Parameter(value.clone())
        optimizer = self.kind.plain([value])
        if twin.moments:
            optimizer.state[value] = twin.moments
        elif self.kind.group_count:
            zeros = {key: torch.zeros_like(value) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[value] = {"step": torch.tensor(0.0), **zeros}
        if self.kind.group_count:
            optimizer.state[value]["step"].fill_(self.count - 1)
        value.grad = grad.to(value.dtype)
        optimizer.step()
        twin.moments = optimizer.state[value]
        if twin.master is not None:
            twin.master = value.detach()
        layer.write(name, value.detach())

    def saved(self, masters: bool = True) -> OptimizerModel:
        """What a state dict holds, perhaps without masters."""
        twins = {
            path: Twin(twin.master if masters else None, copy.deepcopy(twin.moments))
            for path, twin in self.twins.items()
        }
        # States that were empty but for a master are not there.
        present = {path: twin for path, twin in twins.items() if twin.moments or twin.master is not None}
        return OptimizerModel(self.kind, present, self.count)
