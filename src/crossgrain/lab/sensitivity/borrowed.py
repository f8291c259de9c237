"""A model that is measured in high precision, and then is what it was before: recipes, gradients, buffers and all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...convert import convert, unconvert
from ...convert.defaults import left_by_default
from ...convert.layers import ConvertedNorm, become_plain
from ...convert.selection import follows_recipes
from ...linear.saved_planes import Operand
from ...recipe import GemmRecipe
from ...recipe.binding import check_names, layers_of
from ...runtime.logs import withheld
from ...runtime.random_numbers import forked_generators
from ...tensor import QuantizedTensor

HIGH_PRECISION = GemmRecipe.load("all: hp, allow_mixed: true")  # weights that are kept quantized are decoded


@dataclass
class BorrowedModel:
    """A model whose linear layers all run in high precision, by crossgrain's functions, which observers see.

    Attributes:
        model: the model.
        module_types: the type of each layer that a recipe can change, by name.
        left_out: layers that `convert` left alone, and why.
        trained: the parameters that the user trains, by name.
        notes: what `convert` has warned about.
        owners: the module that each layer is part of.
        included: layers that are measured although they stay in high precision by default.
        skipped: layers that the user has left out.
    """

    model: nn.Module
    module_types: dict[str, str]
    left_out: dict[str, str]
    trained: dict[str, nn.Parameter]
    notes: list[str]
    owners: dict[str, Any]
    included: list[str]
    skipped: list[str]

    def __post_init__(self) -> None:
        named = [item for item in self.model.named_parameters() if not isinstance(item[1], QuantizedTensor)]
        self._at: dict[int, list[tuple[str, nn.Parameter]]] = {}  # several parameters may be parts of one buffer
        for name, own in named:
            self._at.setdefault(own.untyped_storage().data_ptr(), []).append((name, own))

    def bind(self, layers: list[str], recipe: GemmRecipe) -> None:
        """Let the modules of some layers follow a recipe. Its rules decide about other layers of the same modules."""
        for owner in {id(self.owners[layer]): self.owners[layer] for layer in layers}.values():
            owner.bound_recipe = recipe

    def owns(self, weight: Operand | None) -> bool:
        """Whether a weight is one of this model, not of another model with layers of the same names."""
        return not isinstance(weight, Tensor) or weight.untyped_storage().data_ptr() in self._at

    def experts(self, layer: str, seen: int) -> int:
        """The number of weights of a layer, of which so many were seen: of a grouped layer, also those without rows."""
        if self.module_types[layer] != "grouped_linear":
            return 1
        owner = self.owners[layer]
        known = getattr(owner, "num_gemms", 0) or getattr(owner, "num_experts", 0)
        return max(seen, int(known))

    def parameter_of(self, layer: str, weight: Operand | None) -> tuple[str, nn.Parameter] | None:
        """Name and parameter of the weight that a layer has multiplied; None if it cannot be told."""
        if isinstance(weight, Tensor):
            for name, parameter in self._at.get(weight.untyped_storage().data_ptr(), ()):
                if 0 <= weight.storage_offset() - parameter.storage_offset() < parameter.numel():
                    return name, parameter
        own = [(name, own) for name, own in self.model.named_parameters() if name.rpartition(".")[0] == layer]
        matrices = [(name, parameter) for name, parameter in own if parameter.dim() > 1]
        return matrices[0] if len(matrices) == 1 else None

    @staticmethod
    def part_like(values: Tensor, parameter: Tensor, weight: Operand | None) -> Tensor:
        """The part of ``values`` that belongs to a weight, if they are numbers for each number of its parameter.

        The weight may be a slice of the parameter, and may be transposed in it.
        """
        values = values.contiguous()
        if not isinstance(weight, Tensor) or isinstance(parameter, QuantizedTensor):
            return values.flatten(1)
        if weight.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            return values.flatten(1)
        start = weight.storage_offset() - parameter.storage_offset()
        return values.as_strided(weight.shape, weight.stride(), start)

    def clear_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self.model.parameters():
            parameter.grad = None


@contextmanager
def borrowed(model: nn.Module, *, skip: Any = (), include: Any = ()) -> Iterator[BorrowedModel]:
    """Context manager: run a model in high precision, and give it back as it was.

    Frozen weights require gradients inside, because what backward does not need is not saved, and could not be seen.
    Random numbers, gradients, buffers, recipes and conversions are restored, also after an error.

    Args:
        model: the model.
        skip: layers to leave alone, as in `convert`.
        include: layers to measure that stay in high precision by default, as in `convert`.

    Raises:
        ValueError: the model has no linear layer or is compiled, or a layer is not named by its path.
    """
    _refuse_compiled(model)
    with _restoring(model), forked_generators():
        by_default = left_by_default(model)
        norms = any(isinstance(module, ConvertedNorm) for module in model.modules())
        with withheld() as warned:
            report = convert(model, HIGH_PRECISION, skip=skip, include=include, norms=norms)
        check_names(model)
        types = {layer.name: layer.module_type for layer in layers_of(model)}
        measured = {name: kind for name, kind in types.items() if name not in report.left}
        trained = {name: own for name, own in model.named_parameters() if own.requires_grad}
        for parameter in model.parameters():
            parameter.grad = None
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
        left = {name: why for name, why in report.left.items() if name in types or name in report.unasked}
        notes = list(warned)
        if any(isinstance(own, QuantizedTensor) for own in model.parameters()):
            notes.append("weights that are kept quantized are decoded, and their decoded numbers are measured")
        included = [name for name in measured if _is_or_is_inside(name, by_default)]
        skipped = [name for name, why in report.left.items() if name in types and why.startswith("skip ")]
        yield BorrowedModel(model, measured, left, trained, notes, _owners(model, measured), included, skipped)


def _is_or_is_inside(name: str, paths: Mapping[str, str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _refuse_compiled(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
            where = f"{path} of this model" if path else "this model"
            raise ValueError(
                f"{where} is compiled, and a compiled graph cannot be seen into. Pass the model that was compiled: its "
                "attribute _orig_mod"
            )


def _owners(model: nn.Module, layers: dict[str, str]) -> dict[str, nn.Module]:
    """The module that each layer is part of: the one with the longest path that the name of the layer begins with."""
    modules = {path: module for path, module in model.named_modules() if follows_recipes(module)}
    owners = {}
    for layer in layers:
        path = layer
        while path and path not in modules:
            path = path.rpartition(".")[0]
        owners[layer] = modules[path]
    return owners


@contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Put back recipes, conversions, names, hooks, gradients, buffers and ``requires_grad``."""
    bound: dict[Any, Any] = {own: (own.bound_recipe, own.name) for own in _followers(model)}
    hooks = [(own, copy(own)) for own in (model._forward_pre_hooks, model._forward_hooks)]
    always_called = dict(model._forward_hooks_always_called)
    flags = {own: (own.requires_grad, own.grad) for own in model.parameters()}
    buffers: list[tuple[Tensor, Tensor]] = [(own, own.clone()) for own in model.buffers()]
    on_gradients = [(own, dict(own)) for p in model.parameters() if (own := p._post_accumulate_grad_hooks)]
    for hooks_of_one, _ in on_gradients:  # they may step an optimizer in backward, which would train the model
        hooks_of_one.clear()
    try:
        yield
    finally:
        if not bound:
            unconvert(model)
        for module in _followers(model):
            if module in bound:
                module.bound_recipe, module.name = bound[module]
            else:
                become_plain(module)
        for own, before in hooks:  # a recipe with histories counts the calls of the model by hooks
            own.clear()
            own.update(before)
        model._forward_hooks_always_called.clear()
        model._forward_hooks_always_called.update(always_called)
        for hooks_of_one, kept_hooks in on_gradients:
            hooks_of_one.clear()
            hooks_of_one.update(kept_hooks)
        for parameter, (requires_grad, gradient) in flags.items():
            parameter.grad = None
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)


def _followers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if follows_recipes(module)]
