"""`gather_quantized`: weights in high precision that travel quantized."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..convert.layers import ConvertedConv1D
from ..formats import Format
from ..linear.padding import Sizes, known_format
from ..nn.base import QuantizedModule
from ..nn.linear_module import LinearDetails, LinearModule
from ..planes import ROWWISE, Direction
from ..recipe import Recipe, as_recipe
from ..tensor import QuantizedTensor
from ..tensor.sharding import is_sharded, local_part, sharded_like, why_not_sharded
from .weight_shard import WeightPlan, WeightShard


@dataclass(frozen=True)
class GatherReport:
    """What `gather_quantized` did, by the path of the weight.

    ``quantized``  formats by direction, of weights that will travel quantized
    ``left``       weights of linear layers that travel as they are, and why
    """

    quantized: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{path}: {formats}" for path, formats in self.quantized.items()]
        return "\n".join([*lines, *(f"{path}: as it is, {reason}" for path, reason in self.left.items())])


def gather_quantized(model: nn.Module, recipe: Recipe | str | os.PathLike[str] | None = None) -> GatherReport:
    """Make the weights of ``model``'s quantized linear layers travel quantized when FSDP2 gathers them.

    For layers that keep their weights in high precision, as `convert` leaves them. Call it after
    ``parallelize_module`` and before ``fully_shard``: parameters are replaced. ``recipe`` is for layers that are not
    bound to one. Weights that are tied, or stay in high precision by the recipe, are left; nothing has changed if a
    weight cannot be gathered as the recipe asks.
    """
    report = GatherReport()
    owners = _owners(model)
    found: list[tuple[nn.Module, str, WeightShard]] = []
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        for index, name in enumerate(module.weight_names):
            parameter = getattr(module, name)
            where = f"{path}.{name}" if path else name
            if is_sharded(module._usable(parameter)):
                raise RuntimeError(f"{where} is sharded already; call gather_quantized before fully_shard")
            weight = local_part(parameter)  # it may have been marked before, for another recipe
            if isinstance(weight, QuantizedTensor):
                continue  # which travels quantized by itself
            own_recipe = module.bound_recipe or (None if recipe is None else as_recipe(recipe))
            reason = _why_left(parameter, owners, own_recipe)
            plan = None if reason or own_recipe is None else _plan(module, index, weight, own_recipe, where)
            if plan is None:
                report.left[where] = reason or "its recipe keeps it in high precision"
                continue
            report.quantized[where] = " / ".join(f"{d.value} {_name(plan, d)}" for d in plan.directions)
            found.append((module, name, WeightShard(weight.detach(), plan)))
    for module, name, shard in found:
        old = getattr(module, name)
        setattr(module, name, nn.Parameter(sharded_like(shard, old), requires_grad=old.requires_grad))
    return report


def _owners(model: nn.Module) -> dict[int, int]:
    """How many modules have a parameter, by its id."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _why_left(parameter: Tensor, owners: dict[int, int], recipe: Recipe | None) -> str | None:
    if recipe is None:
        return "the layer is not bound to a recipe, and none was given"
    if owners.get(id(parameter), 1) > 1:
        return "it is tied to another parameter"
    return None


def _plan(module: QuantizedModule, index: int, weight: Tensor, recipe: Recipe, where: str) -> WeightPlan | None:
    """How the weight travels; None if its layer keeps it in high precision."""
    details = _details(module, index, weight, recipe, where)
    quantizer = details.weight.copy()
    directions = tuple(Direction) if recipe.backward_override is None else (ROWWISE,)
    formats = [known_format(quantizer, direction) for direction in directions]
    if all(fmt is not None and fmt.is_identity for fmt in formats):
        return None
    problem = _problem(module, index, recipe, quantizer, formats)
    if problem is not None:
        raise NotImplementedError(f"{where}: {problem}")
    rows, columns = weight.shape
    padded = details.padding.padded(Sizes(0, columns, rows), backward=True)
    return WeightPlan(module.layer, quantizer, (rows, columns), (padded.n, padded.k), directions)


def _details(module: QuantizedModule, index: int, weight: Tensor, recipe: Recipe, where: str) -> LinearDetails:
    simple = isinstance(module, LinearModule) and len(module.weight_names) == len(module._linear_slots())
    if not simple or weight.dim() != 2 or isinstance(module, ConvertedConv1D):
        raise NotImplementedError(
            f"{where}: the weight {list(weight.shape)} of a {type(module).__name__} is not one matrix that its layer "
            "quantizes as it is"
        )
    details: LinearDetails = module._build_quantizers(recipe).details[index]
    return details


def _problem(
    module: QuantizedModule, index: int, recipe: Recipe, quantizer: Any, formats: list[Format | None]
) -> str | None:
    if any(fmt is None for fmt in formats):
        return "a quantizer written by the user does not say which rows its blocks span"
    if recipe.backward_override == "high_precision":
        return "its backward pass reads the weight in high precision, which stays in shards"
    state = module._built.states["forward"].delayed
    slots: Any = module
    if state is not None and any(at == slots._linear_slots()[index].weight for at, _ in state.columns):
        return "delayed scaling notes an amax whenever a weight is quantized, and a gather is not a step"
    return why_not_sharded(quantizer, [fmt for fmt in formats if fmt is not None])


def _name(plan: WeightPlan, direction: Direction) -> str:
    fmt = known_format(plan.quantizer, direction)
    assert fmt is not None
    return fmt.name
