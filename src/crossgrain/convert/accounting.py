"""Count the multiply-adds of a model, product by product, so that a report can say which share is quantized.

By shapes: every weight multiplies every token once, so a weight counts as many multiply-adds as it has numbers. Of
fused experts, a token uses only some. With sample inputs, the model runs once and every product is counted as it
happens, also those of two activations, such as attention scores. A weight that goes into an operator which does not
show its products (a custom kernel, an RNN of the CPU) counts by shape, for as many rows as others have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import ops
from ..nn import QuantizedModule
from ..recipe import autocast
from ..recipe.binding import is_conv1d
from ..recipe.projections import Projection, adapter_for
from ..runtime.random_numbers import forked_generators
from .projections import ConvertedProjections


@dataclass(frozen=True)
class Product:
    """The products of one weight, or of two activations in one module.

    Attributes:
        path: the layer; of a parameter that is not of a layer, the path of the parameter; of activations, the module.
        multiply_adds: the number of multiply-adds: of one token, or of the sample inputs.
        weight: whether a weight is multiplied; otherwise two activations.
        owner: the type of the module.
        layer: whether `path` is a layer that a recipe can be for.
        read_by: the type of the module that multiplied the weight itself, if the layer was never called for it. Only
            sample inputs show it.
        slides: whether it is of a convolution whose windows overlap or have gaps. By its shape, it counts for one.
    """

    path: str
    multiply_adds: int
    weight: bool = True
    owner: str = ""
    layer: bool = True
    read_by: str = ""
    slides: bool = False


def count_products(model: nn.Module, inputs: Any = None) -> list[Product]:
    """Count the products of one forward pass.

    Args:
        model: the model, converted or not.
        inputs: arguments of the model: a tensor, a tuple of arguments or a mapping of keyword arguments. They may be on
            the meta device, if the model is. Without them, products are counted by shapes, for one token.
    """
    by_shape = list(_by_shape(model))
    return by_shape if inputs is None else _by_running(model, by_shape, inputs)


# ---- by shapes -------------------------------------------------------------------------------------------


def _by_shape(model: nn.Module) -> Iterator[Product]:
    operations: list[str] = []  # paths of linear operations, whose parts hold the weights
    for path, module in model.named_modules():
        if any(path.startswith(f"{operation}.") for operation in operations):
            continue
        if isinstance(module, ops.Linear):
            operations.append(path)
        owner = _own_class(module).__name__
        slides = isinstance(module, _ConvNd) and module.kernel_size != module.stride  # otherwise a patch is a token
        for name, multiply_adds, layer in _own_products(module):
            yield Product(f"{path}.{name}".strip("."), multiply_adds, owner=owner, layer=layer, slides=slides)


def _own_products(module: Any) -> Iterator[tuple[str, int, bool]]:
    """The products of a module without its children: name, multiply-adds, and whether a recipe can be for it."""
    projections = known_projections(module)
    if projections:
        for projection in projections:
            weight: Any = projection.parameter(module)
            if not isinstance(weight, Tensor):
                continue  # an adapter that does not fit its module, which is left with that reason
            size = weight.numel()
            yield projection.name, size * projection.used // projection.groups if projection.groups else size, True
    elif isinstance(module, QuantizedModule):
        for name in module.weight_names:
            weight = getattr(module, name)
            yield "" if len(module.weight_names) == 1 else name, weight.numel(), True
    elif isinstance(module, nn.Linear | ops.Linear) or is_conv1d(module):
        if not is_lazy(module.weight):
            yield "", module.weight.numel(), True
    # Embeddings look numbers up, and a parametrized weight counts as the weight of its layer.
    elif not isinstance(module, nn.Embedding | nn.EmbeddingBag | ParametrizationList):
        for name, parameter in module.named_parameters(recurse=False):
            if not is_lazy(parameter) and _may_be_multiplied(parameter):
                yield name, parameter.numel(), False


def known_projections(module: nn.Module) -> tuple[Projection, ...]:
    """The projections of a module that an adapter knows, also if it cannot be converted."""
    if isinstance(module, ConvertedProjections):
        return module._projections
    adapter = adapter_for(module)
    return () if adapter is None else tuple(adapter.projections(module))


def _may_be_multiplied(parameter: Tensor) -> bool:
    """Whether a parameter may be a weight: it has two dimensions that are more than one. Others scale or shift."""
    return sum(size > 1 for size in parameter.shape) >= 2


def _own_class(module: Any) -> type:
    """The class of a module, or what it was before it was converted."""
    was: Any = vars(module).get("_was")
    return type(module) if was is None else was[0]


# ---- by running ------------------------------------------------------------------------------------------


def _by_running(model: nn.Module, by_shape: list[Product], inputs: Any) -> list[Product]:
    counter = _Counter(_weights(model, {product.path for product in by_shape}))
    args, kwargs = _arguments(inputs)
    with torch.no_grad(), autocast(enabled=False), _aside(model), _module_paths(model, counter), counter:
        model(*args, **kwargs)
    counts = counter.weights
    rows = max((counts.get(each.path, 0) // each.multiply_adds for each in by_shape if each.multiply_adds), default=0)
    for product in by_shape:
        if product.path in counter.hidden:
            counts[product.path] = product.multiply_adds * max(1, rows)
    types = {path: _own_class(module).__name__ for path, module in model.named_modules()}
    readers = {path: types[reader] for path, reader in counter.readers.items() if path not in counter.called}
    return [
        *(
            replace(product, multiply_adds=counts.get(product.path, 0), read_by=readers.get(product.path, ""))
            for product in by_shape
        ),
        *(Product(path, count, False, types.get(path, ""), False) for path, count in counter.activations.items()),
    ]


@contextmanager
def _aside(model: nn.Module) -> Iterator[None]:
    """Run a model for inference without a trace: its modes, the random state and torch's fast paths are restored."""
    training = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # it computes a whole layer in one operator
    try:
        with forked_generators():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, was_training in training:
            module.training = was_training


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


class _Weight(NamedTuple):
    """Where a weight is in its storage, as many weights may be in one; the path of its product."""

    first: int
    stop: int
    path: str
    owners: set[str]  # the modules that have it


_Weights = dict[int, dict[int, _Weight]]  # by the address of the storage object, and by the first number


def _weights(model: nn.Module, known: set[str]) -> _Weights:
    found: _Weights = {}
    for path, module in model.named_modules():
        names = {projection.weight: projection.name for projection in known_projections(module)}
        for name, parameter in module.named_parameters(recurse=False):
            product = f"{path}.{names.get(name, name)}".strip(".")
            for candidate in (product, path):  # a layer with one weight has the name of its module
                if candidate in known and parameter.dim() > 1:
                    here, first = found.setdefault(_storage(parameter), {}), parameter.storage_offset()
                    owners = here[first].owners if first in here else set()
                    here[first] = _Weight(first, first + parameter.numel(), candidate, owners | {path})
                    break
    return found


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


@contextmanager
def _module_paths(model: nn.Module, counter: _Counter) -> Iterator[None]:
    """Tell the counter which module is running."""
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: counter.stack.append(path)))
        handles.append(module.register_forward_hook(lambda *_: counter.stack.pop() and None, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Counter(TorchDispatchMode):
    """Counts products where they happen, and finds out which weight is in them."""

    def __init__(self, weights: _Weights) -> None:
        super().__init__()
        self._weights = weights
        self._copies: list[Tensor] = []  # of weights; kept, so that their storages keep their addresses
        self.weights: dict[str, int] = {}
        self.activations: dict[str, int] = {}
        self.hidden: set[str] = set()  # weights of operators that do not show their products, such as custom kernels
        self.called: set[str] = set()  # products that happened inside of a module that has the weight
        self.readers: dict[str, str] = {}  # of other products: the module that was running
        self.stack: list[str] = [""]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = _PRODUCTS.get(func.overloadpacket)
        if count is not None:
            operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self._add(operands, count(result if isinstance(result, Tensor) else result[0], args))
        elif func.overloadpacket in _COPIES and isinstance(args[0], Tensor):
            weight = self._weight_of(args[0])
            if weight is not None and _copied(result.shape, args[0].shape):
                self._copies.append(result)
                self._weights[_storage(result)] = {0: weight._replace(first=0, stop=result.numel())}
        elif func.namespace != "aten" or func.overloadpacket in _OPAQUE:
            operands = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            self.hidden |= {weight.path for tensor in operands if (weight := self._weight_of(tensor)) is not None}
        return result

    def _weight_of(self, tensor: Tensor) -> _Weight | None:
        """The weight that a tensor is a part of, if it is one."""
        here, first = self._weights.get(_storage(tensor), {}), int(tensor.storage_offset())
        return here.get(first) or next((each for each in here.values() if each.first <= first < each.stop), None)

    def _add(self, operands: list[Tensor], multiply_adds: int) -> None:
        known = (self._weight_of(tensor) for tensor in operands if tensor.dim() > 1)
        weight = next((each for each in known if each is not None), None)
        if weight is None:
            self.activations[self.stack[-1]] = self.activations.get(self.stack[-1], 0) + multiply_adds
            return
        self.weights[weight.path] = self.weights.get(weight.path, 0) + multiply_adds
        if weight.owners.isdisjoint(self.stack[1:]):
            self.readers[weight.path] = self.stack[-1]
        else:
            self.called.add(weight.path)


def _copied(copy: torch.Size, original: torch.Size) -> bool:
    """Whether a copy has the weights of the original: all of them, or for each row that of its expert."""
    return copy == original or (len(copy) == len(original) == 3 and copy[1:] == original[1:])


def _inner(at: int) -> Callable[[Tensor, Any], int]:
    """Counts a product whose operand ``at`` has the summed dimension last."""
    return lambda result, args: result.numel() * args[at].shape[-1]


def _convolved(result: Tensor, args: Any) -> int:
    positions: Tensor = args[0] if args[6] else result  # of a transposed convolution, those of its input
    return positions.numel() * int(args[1][0].numel())


def _attended(result: Tensor, args: Any) -> int:
    return 2 * int(args[0].numel() * args[1].shape[-2])  # scores of queries and keys, and their product with values


_aten = torch.ops.aten
_PRODUCTS: dict[Any, Callable[[Tensor, Any], int]] = {
    _aten.mm: _inner(0),
    _aten.addmm: _inner(1),
    _aten.bmm: _inner(0),
    _aten.baddbmm: _inner(1),
    _aten.mv: _inner(0),
    _aten.dot: lambda result, args: args[0].numel(),
    _aten.convolution: _convolved,
    _aten._grouped_mm: _inner(0),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attended,
    _aten._scaled_dot_product_flash_attention: _attended,
    _aten._scaled_dot_product_efficient_attention: _attended,
    _aten._scaled_dot_product_cudnn_attention: _attended,
}
_OPAQUE = {_aten.mkldnn_rnn_layer, _aten._cudnn_rnn, _aten.miopen_rnn, _aten._native_multi_head_attention}
# Of a weight: as it is, scaled or shifted, or a choice of experts.
_COPIES = {_aten._to_copy, _aten.clone, _aten.mul, _aten.add, _aten.index, _aten.index_select}
