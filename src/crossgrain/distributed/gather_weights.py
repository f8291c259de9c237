"""`gather_quantized`: keep weights in high precision, but let FSDP2 send them between ranks quantized."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..convert.layers import ConvertedConv1D
from ..convert.projections import ConvertedProjections
from ..formats import Format
from ..linear.padding import Sizes, known_format
from ..nn.base import QuantizedModule
from ..nn.linear_module import LinearDetails, LinearModule
from ..planes import ROWWISE, Direction
from ..recipe import Recipe, as_recipe
from ..tensor import QuantizedTensor
from ..tensor.sharding import is_sharded, local_part, sharded_like, why_not_sharded
from .weight_shard import WeightLayout, WeightShard


@dataclass(frozen=True)
class GatherReport:
    """The result of `gather_quantized`: how each weight will travel. ``print`` it to read it.

    Attributes:
        quantized: weights that will travel quantized, with their formats in each direction.
        left: weights of linear layers that will travel unquantized, with the reason.
    """

    quantized: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{path}: {formats}" for path, formats in self.quantized.items()]
        return "\n".join([*lines, *(f"{path}: unquantized because {reason}" for path, reason in self.left.items())])


def gather_quantized(model: nn.Module, recipe: Recipe | str | os.PathLike[str] | None = None) -> GatherReport:
    """Make FSDP2 gather the weights of quantized linear layers in their quantized formats.

    This is for layers that keep their weights in high precision, as `crossgrain.convert` leaves them. Call it after
    ``parallelize_module`` and before ``fully_shard``, because it replaces parameters. Weights that are tied to others,
    or that the recipe keeps in high precision, travel unquantized.

    Args:
        model: the model to change in place.
        recipe: the recipe of layers that are not bound to one by `crossgrain.convert`.

    Returns:
        Which weights will travel quantized, and which will not and why.

    Raises:
        RuntimeError: a weight is sharded already.
        NotImplementedError: a weight cannot be gathered in the format of its recipe; then nothing has changed.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())

        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> print(cg.distributed.gather_quantized(model))  # before fully_shard
        0.weight: rowwise mxfp8 / columnwise mxfp8
        >>> _ = fully_shard(model)(torch.randn(32, 32))
        >>> torch.distributed.destroy_process_group()
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
                raise RuntimeError(f"{where} is already sharded; call gather_quantized before fully_shard")
            weight = local_part(parameter)  # it may have been marked before, for another recipe
            if isinstance(weight, QuantizedTensor):
                continue  # which travels quantized by itself
            own_recipe = module.bound_recipe or (None if recipe is None else as_recipe(recipe))
            reason = _why_left(module, parameter, owners, own_recipe)
            layout = None if reason or own_recipe is None else _layout(module, index, weight, own_recipe, where)
            if layout is None:
                report.left[where] = reason or "its recipe keeps it in high precision"
                continue
            report.quantized[where] = " / ".join(f"{d.value} {_name(layout, d)}" for d in layout.directions)
            found.append((module, name, WeightShard(weight.detach(), layout)))
    for module, name, shard in found:
        old = getattr(module, name)
        setattr(module, name, nn.Parameter(sharded_like(shard, old), requires_grad=old.requires_grad))
    return report


def _owners(model: nn.Module) -> dict[int, int]:
    """For each parameter, by its id, how many modules have it."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _why_left(module: nn.Module, parameter: Tensor, owners: dict[int, int], recipe: Recipe | None) -> str | None:
    if isinstance(module, ConvertedProjections):
        return "it is not the one matrix of a linear layer, such as the weights of all experts in one parameter"
    if recipe is None:
        return "the layer is not bound to a recipe, and no recipe was passed"
    if owners.get(id(parameter), 1) > 1:
        return "it is tied to another parameter"
    return None


def _layout(module: QuantizedModule, index: int, weight: Tensor, recipe: Recipe, where: str) -> WeightLayout | None:
    """How to send the weight; None if its layer keeps it in high precision."""
    details = _details(module, index, weight, recipe, where)
    quantizer: Any = details.weight.copy()
    if quantizer.makes_columns_late:  # each pass gathers the planes that it reads, so there are no rows in backward
        quantizer.columnwise_source = "rowwise_dequantized"
    directions = tuple(Direction) if recipe.backward_override is None else (ROWWISE,)
    formats = [known_format(quantizer, direction) for direction in directions]
    if all(fmt is not None and fmt.is_identity for fmt in formats):
        return None
    problem = _problem(module, index, recipe, quantizer, formats)
    if problem is not None:
        raise NotImplementedError(f"{where}: {problem}")
    rows, columns = weight.shape
    padded = details.padding.padded(Sizes(0, columns, rows), backward=True)
    return WeightLayout(module.layer, quantizer, (rows, columns), (padded.n, padded.k), directions)


def _details(module: QuantizedModule, index: int, weight: Tensor, recipe: Recipe, where: str) -> LinearDetails:
    simple = isinstance(module, LinearModule) and len(module.weight_names) == len(module._linear_slots())
    if not simple or weight.dim() != 2 or isinstance(module, ConvertedConv1D):
        raise NotImplementedError(
            f"{where}: gather_quantized needs a weight that is one matrix which its layer quantizes as a whole; the "
            f"weight {list(weight.shape)} of a {type(module).__name__} is not"
        )
    details: LinearDetails = module._build_quantizers(recipe).details[index]
    return details


def _problem(
    module: QuantizedModule, index: int, recipe: Recipe, quantizer: Any, formats: list[Format | None]
) -> str | None:
    if any(fmt is None for fmt in formats):
        return "its quantizer is not one of crossgrain's, so it is unknown which rows a block spans"
    if recipe.backward_override == "high_precision":
        return "its recipe has backward_override='high_precision', but the high-precision weight stays in shards"
    state = module._built.states["forward"].delayed
    slots: Any = module
    if state is not None and any(at == slots._linear_slots()[index].weight for at, _ in state.columns):
        return "with delayed scaling, quantizing a weight records an amax of the step, but a gather is not a step"
    return why_not_sharded(quantizer, [fmt for fmt in formats if fmt is not None])


def _name(layout: WeightLayout, direction: Direction) -> str:
    fmt = known_format(layout.quantizer, direction)
    assert fmt is not None
    return fmt.name
