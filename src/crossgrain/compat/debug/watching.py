"""One call of a layer under debug features: they change its operands before it runs, and look at its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import kernels
from ...formats import Format
from ...gemm.operands import GEMMS, check_operands
from ...linear.call import LinearCall
from ...linear.gathered_weight import GatheredWeight
from ...linear.padding import known_format, padding_for
from ...planes import COLUMNWISE, ROWWISE, CutsBlocks, Direction, Plane, PlanePair, matrix_shape
from ...planes.slicing import slice_plane
from ...quantizers.base import Quantizer
from ...quantizers.by_format import quantizer_of
from ...quantizers.holding import holding
from ...runtime.collectives import group_rank
from ...runtime.passes import current_pass
from ...runtime.settings import settings
from ...tensor import QuantizedTensor
from ...tensor.sharding import local_part
from .plans import LayerPlan
from .quantizers import FeatureQuantizer, Modified, changed_quantizer, child_of
from .tensors import OF_GEMM, OPERANDS, gemm_of

if TYPE_CHECKING:
    from .session import Session

Quantizers = Mapping[str, Quantizer | None]
"""What the recipe has made for the activation, the weight and the gradient."""


# ---- changing operands ---------------------------------------------------------------------------------------


def change_operands(call: LinearCall, plan: LayerPlan, weight: Tensor, quantizers: Quantizers, ask: Any) -> None:
    """Give a call the quantizers that features ask for.

    Raises:
        ValueError: that is not possible for this layer.
    """
    if call.input is None and not any("feature" in ways.values() for ways in plan.ways.values()):
        return  # it is in high precision already
    _check_backward(call, plan)
    if "weight" in plan.changed:
        _check_weight(weight, plan)
        call.quantized_weight = None  # a copy that was kept for later calls is as the recipe says
    for tensor, own in OPERANDS.items():
        modified: dict[Direction, Modified] = {}
        for direction, way in plan.ways[tensor].items():
            about = {"tensor_name": tensor, "gemm": gemm_of(tensor, direction), "default_quantizer": quantizers[tensor]}
            if way == "feature":
                makes = ask(plan.layer, "check_modify_tensor", plan.iteration, **about)
                modified[direction] = Modified(partial(_modified, ask, plan, about), makes)
        if tensor in plan.changed or quantizers[tensor] is None:
            try:
                setattr(call, own, changed_quantizer(quantizers[tensor], plan.ways[tensor], modified, call.dtype))
            except ValueError as error:
                raise ValueError(f"layer {plan.layer!r}: debug features change {tensor}, but {error}") from error
    _check_pairs(call, plan)
    assert call.input is not None and call.weight is not None
    kept, new = (
        call.padding,
        padding_for(call.input, call.weight, call.grad_output if call.quantizes_backward else None),
    )
    if call.quantized_weight is not None or isinstance(weight, QuantizedTensor):
        new = new._replace(k=math.lcm(kept.k, new.k), n=math.lcm(kept.n, new.n))  # planes of the weight are padded so
    call.padding = new


def _modified(ask: Any, plan: LayerPlan, about: Mapping[str, Any], matrix: Tensor) -> Any:
    made = ask(plan.layer, "modify_tensor", plan.iteration, tensor=matrix, **about)
    if made.shape != matrix.shape:
        raise ValueError(
            f"layer {plan.layer!r}: a debug feature made a tensor of shape {list(made.shape)} of the "
            f"{about['tensor_name']} in {about['gemm']}, which has the shape {list(matrix.shape)}"
        )
    return made


def _check_backward(call: LinearCall, plan: LayerPlan) -> None:
    """Raise if a recipe decides about backward in another way than by quantizers."""
    override = call.backward_override
    if override is None:
        return
    for tensor, ways in plan.ways.items():
        for direction, way in ways.items():
            gemm = gemm_of(tensor, direction)
            if gemm == "fprop" or way == "recipe" or (way, override) == ("high precision", "high_precision"):
                continue
            raise ValueError(
                f"layer {plan.layer!r}: debug features change {tensor} in {gemm}, but the recipe has "
                f"backward_override={override!r}, by which {gemm} multiplies no quantized operands: leave out one of "
                "both"
            )


def _check_weight(weight: Tensor, plan: LayerPlan) -> None:
    """Raise if there are no numbers in high precision to make another operand from."""
    if isinstance(weight, QuantizedTensor | GatheredWeight):
        how = "gathered" if isinstance(weight, GatheredWeight) else "kept"
        raise ValueError(
            f"layer {plan.layer!r}: debug features change the operands that are made of its weight, but the weight is "
            f"{how} quantized, and has no numbers in high precision: create the model without quantized_model_init, or "
            "shard it without gathering planes"
        )


def _check_pairs(call: LinearCall, plan: LayerPlan) -> None:
    """Raise if the two operands of a GEMM cannot be multiplied any more."""
    if call.allow_mixed or settings.strict:
        return
    quantizers = {"input": call.input, "weight": call.weight, "grad_output": call.grad_output}
    for gemm, operands in GEMMS.items():
        if gemm != "fprop" and not call.quantizes_backward:
            continue
        formats = [(own, direction, _format(quantizers[own], direction)) for own, direction in operands.items()]
        try:
            check_operands(gemm, [(own, direction, fmt) for own, direction, fmt in formats if fmt], plan.layer)
        except ValueError as error:
            raise ValueError(f"{error}. Debug features have changed {', '.join(plan.changed)} of this layer") from error


def _format(quantizer: Quantizer | None, direction: Direction) -> Format | None:
    child = child_of(quantizer, direction)
    if child is None or isinstance(child, FeatureQuantizer):
        return None if child is None else child.makes
    return known_format(child, direction)


# ---- looking at tensors --------------------------------------------------------------------------------------


class Watch:
    """A probe of one call: shows its tensors to features, and lets them change results of GEMMs.

    Args:
        session: the session.
        plan: what features want.
        call: the call.
        quantizers: what the recipe has made for its tensors.
        tp_group: the ranks that share the layer.
        tp_size: their number.
    """

    def __init__(
        self,
        session: Session,
        plan: LayerPlan,
        call: LinearCall,
        quantizers: Quantizers,
        tp_group: Any,
        tp_size: int,
    ) -> None:
        self._session = session
        self._plan = plan
        self._call = call
        self._quantizers = quantizers
        self._ranks = {"tp_group": tp_group, "tp_size": tp_size}

    def forward(self, x: Tensor, weight: Tensor, x_operands: Any, weight_operands: Any) -> None:
        if current_pass().recomputes:  # the first pass has shown them
            return
        self._session.expect(self._plan)
        parallel = self._call.parallel
        if parallel is not None and parallel.gathers_input:
            rows = matrix_shape(x.shape)[0]
            x_operands = tuple(_own_rows(operand, rows, parallel.group) for operand in x_operands)
        self._show("activation", x, x_operands, self._call.dtype)
        self._show("weight", weight, weight_operands)

    def backward(self, dy: Tensor, rows: Any, columns: Any) -> None:
        parallel = self._call.parallel
        if parallel is not None and parallel.gathers_gradient:
            rows, columns = (_own_rows(operand, dy.shape[0], parallel.group) for operand in (rows, columns))
        self._show("gradient", dy, (rows, columns))

    def result(self, gemm: str, value: Tensor) -> Tensor:
        tensor = OF_GEMM[gemm]
        if tensor in self._plan.modified:
            about = {"tensor_name": tensor, "gemm": gemm, "default_quantizer": None}
            made = _modified(self._session.ask, self._plan, about, value)
            value = (made.dequantize() if isinstance(made, QuantizedTensor) else made).to(value.dtype)
        if tensor in self._plan.inspected and not (gemm == "fprop" and current_pass().recomputes):
            self._inspect(tensor, value)
        return value

    def watches(self, gemm: str) -> bool:
        return OF_GEMM[gemm] in self._plan.inspected or self.modifies(gemm)

    def modifies(self, gemm: str) -> bool:
        return OF_GEMM[gemm] in self._plan.modified

    def _show(self, name: str, given: Tensor, operands: tuple[Any, Any], dtype: torch.dtype | None = None) -> None:
        """Show an operand to the features that want to see it."""
        plan = self._plan
        later = [direction for direction in Direction if (name, direction) in plan.inspected_later]
        if name not in plan.inspected and not later:
            return
        tensor = self._numbers(given, operands[0])
        tensor = tensor if dtype is None else tensor.to(dtype)  # in which it was quantized
        planes = {
            direction: operand
            for direction, operand in zip((ROWWISE, COLUMNWISE), operands, strict=True)
            if isinstance(operand, Plane) and operand.direction is direction
        }
        made = self._quantized(name, tensor, planes)
        if name in plan.inspected:
            self._inspect(
                name,
                tensor,
                rowwise_quantized_tensor=made[ROWWISE],
                columnwise_quantized_tensor=made[COLUMNWISE],
                quantizer=self._quantizers[name],
            )
        for direction in later:
            if made[direction] is not None and plan.ways[name][direction] != "high precision":
                about = {"gemm": gemm_of(name, direction), "rowwise": direction is ROWWISE, **self._ranks}
                self._ask("inspect_tensor_postquantize", tensor_name=name, tensor=made[direction], **about)

    def _inspect(self, name: str, tensor: Tensor, **about: Any) -> None:
        self._session.saw(self._plan.layer, name)
        if tensor.numel():  # a group may have no rows
            self._ask("inspect_tensor", tensor_name=name, tensor=tensor, **about, **self._ranks)

    def _ask(self, call: str, **about: Any) -> None:
        if not self._session.ended:
            self._session.ask(self._plan.layer, call, self._plan.iteration, **about)

    def _numbers(self, given: Tensor, rows: Any) -> Tensor:
        """A tensor in high precision: as it is, or decoded if it came quantized."""
        if isinstance(given, QuantizedTensor):
            return given.dequantize(dtype=self._call.dtype).detach()
        hollow = self._call.quantized_input is not None and not any(given.stride())  # it stands for planes
        if isinstance(rows, Plane) and (hollow or isinstance(given, GatheredWeight)):
            return kernels.decode(rows, given.dtype)[: given.shape[0], : given.shape[-1]]
        tensor = given.detach()
        return tensor if type(tensor) is Tensor else local_part(tensor)

    def _quantized(self, name: str, tensor: Tensor, planes: Mapping[Direction, Plane]) -> dict[Direction, Any]:
        """What GEMMs read of a tensor, by direction: quantized tensors, or tensors in high precision.

        As the recipe makes it, both directions are one object. Quantized tensors have the padding of the layer.
        """
        parent, ways = self._quantizers[name], self._plan.ways[name]
        if parent is not None and not _is_custom(parent) and set(ways.values()) == {"recipe"}:
            both = PlanePair(planes.get(ROWWISE), planes.get(COLUMNWISE))
            return dict.fromkeys(Direction, holding(parent, both, tensor.dtype) if planes else None)
        made: dict[Direction, Any] = {}
        for direction in Direction:
            plane, child = planes.get(direction), child_of(parent, direction)
            if ways[direction] == "high precision" or (child is None and ways[direction] == "recipe"):
                made[direction] = tensor
            elif plane is None:
                made[direction] = None
            elif plane.format.is_identity:
                rows, columns = matrix_shape(tensor.shape)
                made[direction] = plane.data[:rows, :columns]
            else:
                own = child if ways[direction] == "recipe" and child is not None and not child.custom else None
                alone = PlanePair(*(plane if side is direction else None for side in Direction))
                made[direction] = holding(own or quantizer_of(plane.format), alone, tensor.dtype)
        return made


def _own_rows(operand: Any, rows: int, group: Any) -> Any:
    """Of an operand with the rows of all ranks, those of this rank; None if they are no whole blocks."""
    if not isinstance(operand, Plane) or operand.shape[0] == rows:
        return operand
    start = group_rank(group) * rows
    try:
        return slice_plane(operand, operand.shape, 0, start, start + rows)
    except CutsBlocks:
        return None


def _is_custom(quantizer: Quantizer) -> bool:
    return any(own.custom for own in quantizer.plain_quantizers())
