"""Modules that multiply weights of their own, such as fused experts, with these products in the formats of a recipe."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..linear.call import activation_dtype
from ..linear.grouped_function import Groups
from ..linear.parallel import local
from ..nn.compiled import constant_traceable
from ..nn.forward_pass import ForwardPass, TracedPass
from ..nn.grouped_call import grouped_call
from ..nn.linear_module import LinearModule, LinearSlots
from ..nn.module_interface import Mode
from ..quantizers.base import Quantizer
from ..quantizers.groups_alike import validate_grouped_quantizer_list
from ..recipe import QuantizerRole, Recipe, quantized_model_init
from ..recipe.projections import LayerAdapter, Projection, adapter_for
from ..runtime.torch_patches.compiler_marks import eager_only
from ..runtime.transforms import current_transform, get_tracing_state, refuse_transforms
from ..tensor import QuantizedTensor

_OF_EVERY_MODULE = vars(nn.Module()).keys()
_SLOTS_FORWARD, _SLOTS_BACKWARD = 3, 2


class ConvertedProjections(LinearModule):
    """A module whose projections `crossgrain.convert` has changed. Its adapter computes it.

    The linear layers of the module are all groups of its first projection, then those of the second, and so on.
    """

    _adapter: LayerAdapter
    _projections: tuple[Projection, ...]

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is what crossgrain.convert makes and cannot be created directly")

    # ---- what the module consists of -----------------------------------------------------------

    @property
    def weight_names(self) -> list[str]:
        return [projection.weight for projection in self._projections]

    def _layers(self) -> list[tuple[Projection, int]]:
        """The projections, each with the index of its first linear layer."""
        found, first = [], 0
        for projection in self._projections:
            found.append((projection, first))
            first += projection.groups or 1
        return found

    def _layer_count(self) -> int:
        return sum(projection.groups or 1 for projection in self._projections)

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        roles: list[QuantizerRole | None] = []
        for projection in self._projections:
            kind, name = projection.module_type, projection.path_in(self.name or "")
            tensors = ("input", "weight") if fwd else ("grad_output",)
            one = [*(QuantizerRole(kind, tensor, name) for tensor in tensors), None]
            roles += one * (projection.groups or 1)
        return self._counted(roles, num_quantizers)

    def _slot_counts(self) -> Mapping[Mode, int]:
        count = self._layer_count()
        return {"forward": _SLOTS_FORWARD * count, "backward": _SLOTS_BACKWARD * count}

    def _linear_slots(self) -> Sequence[LinearSlots]:
        return [LinearSlots(3 * i, 3 * i + 1, 3 * i + 2, 2 * i, 2 * i + 1) for i in range(self._layer_count())]

    def _weights_and_operands(
        self, quantizers: Mapping[str, Sequence[Quantizer]]
    ) -> list[tuple[str, Mapping[str, Quantizer]]]:
        operands = self._gemm_operands(quantizers)  # all groups of a projection have the same formats
        return [(projection.weight, operands[first]) for projection, first in self._layers()]

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> Any:
        if recipe.custom():
            operands = self._gemm_operands(quantizers)
            for projection, first in self._layers():
                groups = operands[first : first + (projection.groups or 1)]
                for tensor in ("input", "weight", "grad_output"):
                    layer = projection.path_in(self.layer)
                    validate_grouped_quantizer_list(
                        [each[tensor] for each in groups], operand_name=f"{layer}: {tensor}"
                    )
        return super()._details(recipe, quantizers)

    def _cache_name(self, index: int) -> str:
        return f"weight{index}"

    # ---- running -------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module, with the arguments that its own class takes."""
        if torch.compiler.is_compiling():
            if not constant_traceable(self):
                return _untraced(self, *args, **kwargs)
        elif get_tracing_state() is not None or current_transform() is not None:
            refuse_transforms(self.layer)
        return _computed(self, *args, **kwargs)

    def _traceable(self) -> bool:
        # The numbers of rows of groups are only known when a graph runs.
        return not any(projection.groups for projection in self._projections) and super()._traceable()

    def _multiply(
        self,
        this: ForwardPass | TracedPass,
        name: str,
        x: Tensor,
        *,
        sizes: Sequence[int] | None = None,
        rows: slice | None = None,
    ) -> Tensor:
        """Compute one projection; see `Multiply`."""
        projection, first = self._find(name)
        this = this._replace(dtype=activation_dtype(x))
        parameter = projection.parameter(self)
        if isinstance(parameter, QuantizedTensor) and (projection.transposed or rows is not None):
            raise NotImplementedError(
                f"{projection.path_in(self.layer)}: the weight is kept quantized, but this layer reads "
                f"{'it transposed' if projection.transposed else 'a part of it'}; keep it in high precision"
            )
        if projection.groups:
            assert isinstance(this, ForwardPass)
            return self._grouped(projection, first, x, sizes, this)
        weight, bias = local(projection.matrices(self)), local(projection.bias_of(self))
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return self._linear(first, x, weight, bias, this, parameters=[parameter])

    def _grouped(
        self, projection: Projection, first: int, x: Tensor, sizes: Sequence[int] | None, this: ForwardPass
    ) -> Tensor:
        layer = projection.path_in(self.layer)
        if sizes is None or len(sizes) != projection.groups or sum(sizes) != x.shape[0]:
            raise ValueError(
                f"{layer}: sizes must have {projection.groups} numbers that add up to the {x.shape[0]} rows of the "
                f"input, got {sizes}"
            )
        packed, packed_bias = local(projection.matrices(self)), local(projection.bias_of(self))
        members = [group for group, size in enumerate(sizes) if size]  # weights of others are not even quantized
        if not members:
            return x.new_zeros((0, packed.shape[1]))
        weights = _parts(packed) if not isinstance(packed, QuantizedTensor) else _quantized_parts(packed)
        groups = Groups(
            [sizes[group] for group in members],
            [weights[group] for group in members],
            [None if packed_bias is None else packed_bias.detach()[group] for group in members],
            packed_weight=packed,
            packed_bias=packed_bias,
            members=members,
        )
        indices = [first + group for group in members]
        return grouped_call(self, x, groups, this, indices=indices, parameter=projection.parameter(self))

    def gemm_weight(self, index: int) -> Tensor:
        """The weight [out, in] of linear layer ``index``."""
        for projection, first in self._layers():
            if index < first + (projection.groups or 1):
                break
        packed = projection.matrices(self)
        if not projection.groups:
            return packed
        return (_quantized_parts(packed) if isinstance(packed, QuantizedTensor) else _parts(packed))[index - first]

    def _find(self, name: str) -> tuple[Projection, int]:
        for projection, first in self._layers():
            if projection.name == name:
                return projection, first
        known = ", ".join(repr(projection.name) for projection in self._projections)
        raise ValueError(f"{self.layer} has no projection {name!r}, only {known}")

    def extra_repr(self) -> str:
        """What the class of the module says, and the formats of the recipe."""
        return ", ".join(filter(None, (super().extra_repr(), self._formats_repr().removeprefix(", "))))

    # ---- copies --------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        was: Any = vars(self)["_was"]
        return _rebuilt, (was[0],), self.__getstate__()  # the class itself cannot be imported by its name


def _parts(packed: Tensor) -> list[Tensor]:
    return list(packed.detach().unbind(0))


def _quantized_parts(packed: QuantizedTensor) -> list[Tensor]:
    groups, rows, columns = packed.shape
    flat = packed._viewed((groups * rows, columns))
    return [flat._sliced(0, group * rows, (group + 1) * rows) for group in range(groups)]


def _computed(module: ConvertedProjections, *args: Any, **kwargs: Any) -> Any:
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()]
    if not given:
        raise TypeError(f"{module.layer}: there is no tensor of floating-point numbers among its arguments")
    this = module._forward_pass(given[0], None)
    with this.step:
        return module._adapter.forward(module, functools.partial(module._multiply, this), *args, **kwargs)


_untraced = eager_only("crossgrain: experts, weights that are kept quantized and custom quantizers run in eager mode")(
    _computed
)


# ---- changing a module -----------------------------------------------------------------------------------


_classes: dict[type[nn.Module], type[ConvertedProjections]] = {}  # one for each, so that copies have the same class


def converted_class(cls: type[nn.Module]) -> type[ConvertedProjections]:
    """The class that a module of class ``cls`` gets; still a subclass of ``cls``."""
    if cls not in _classes:
        _classes[cls] = type(f"Converted{cls.__name__}", (ConvertedProjections, cls), {"__module__": __name__})
    return _classes[cls]


def _rebuilt(cls: type[nn.Module]) -> ConvertedProjections:
    converted = converted_class(cls)
    return converted.__new__(converted)


def own_fields(module: nn.Module, adapter: LayerAdapter) -> dict[str, Any]:
    """The attributes that a module gets when it is converted."""
    fields: Any = ConvertedProjections.__new__(ConvertedProjections)
    with quantized_model_init(enabled=False):
        LinearModule.__init__(fields, None)
    own = {key: value for key, value in vars(fields).items() if key not in _OF_EVERY_MODULE}
    return {**own, "_adapter": adapter, "_projections": tuple(adapter.projections(module))}


def why_not_projections(module: nn.Module) -> str | None:
    """Why a module with an adapter cannot be converted; None if it can."""
    adapter = adapter_for(module)
    assert adapter is not None
    reason = adapter.why_not(module)
    if reason is not None:
        return reason
    taken = own_fields(module, adapter).keys() & (vars(module).keys() | _properties(type(module)))
    if taken:
        return f"it has an attribute {sorted(taken)[0]!r}, which crossgrain needs itself"
    return None


def _properties(cls: type) -> set[str]:
    return {
        key
        for base in cls.__mro__
        if base is not nn.Module
        for key, value in vars(base).items()
        if isinstance(value, property)
    }


def become_projections(module: Any) -> None:
    """Change the class of a module that an adapter knows; `layers.become_plain` undoes it."""
    adapter = adapter_for(module)
    assert adapter is not None
    own = own_fields(module, adapter)
    own["_was"] = (type(module), tuple(own))
    vars(module).update(own)
    module.__class__ = converted_class(type(module))
