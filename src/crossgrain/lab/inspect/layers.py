"""Which layers a model has: their names in records, and why some of them are not seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from ...convert.accounting import count_products
from ...gemm.operands import TENSORS
from ...nn import QuantizedModule
from ...planes import Direction
from ...quantizers.identity import IdentityQuantizer
from ...quantizers.subject import Subject

Seen = Mapping[tuple[str, str], set[str]]  # directions by layer and tensor
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # what torch puts into paths
_WHY = {
    "input": "the layer did not run with gradients",
    "weight": "it was not quantized in this step: it is frozen or cached, or it is kept quantized and was not written",
    "grad_output": "no backward pass reached the layer",
}


class LayerNames:
    """The names of the layers of a model in records.

    A layer has the name that its recipe knows it by. If its module has no name, or several modules have the same, it is
    the path in the model instead.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[int, tuple[Subject, str]] = {}  # by id of the subject, which is kept alive
        self._foreign: dict[int, Subject] = {}

    def name(self, subject: Subject) -> str | None:
        """The name of the layer of a subject; None if it is not a layer of this model."""
        key = id(subject)
        if key not in self._names:
            if key in self._foreign:
                return None
            self._find()
        if key in self._names:
            return self._names[key][1]
        self._foreign[key] = subject
        return None

    def _find(self) -> None:
        self._names.clear()
        found = list(subjects(self._model))
        owners = defaultdict(set)
        for path, _, subject in found:
            owners[subject.layer].add(path)
        for path, module, subject in found:
            name = subject.layer
            if path and (module.name is None or len(owners[name]) > 1):
                name = path if name == module.layer else f"{path}.{name}"
            self._names[id(subject)] = (subject, name)


def subjects(model: nn.Module) -> Iterator[tuple[str, QuantizedModule, Subject]]:
    """The subjects of all quantizers of a model that have been made, with the path of their module."""
    for path, module in quantized_modules(model):
        for quantizer in _quantizers(module):
            for plain in quantizer.plain_quantizers():
                yield path, module, plain.subject


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, QuantizedModule]]:
    """The modules that follow recipes, with their paths, without what wrappers of torch add to them."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            yield plain_path(path), module


def plain_path(path: str) -> str:
    """A path without the names that wrappers of torch add."""
    for wrapper in _WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def not_quantized(model: nn.Module) -> dict[str, str]:
    """The layers of a model that are not quantized modules, and their types."""
    ours = [path for path, _ in quantized_modules(model)]
    found = {}
    for product in count_products(model):
        path = plain_path(product.path)
        if not any(path == own or path.startswith(f"{own}.") or own.startswith(f"{path}.") for own in ours):
            found[path] = product.owner
    return found


class NotSeen(NamedTuple):
    """Why a layer, or some of its tensors, were not seen.

    Attributes:
        why: the reasons.
        surprising: the layer ran and quantizes, but nothing of it was seen, or it cannot be seen.
    """

    why: str
    surprising: bool = False


def not_seen(model: nn.Module, names: LayerNames, seen: Seen) -> dict[str, NotSeen]:
    """The layers that are quantized modules and were not seen, or not all of their tensors.

    Args:
        model: the model.
        names: the names of its layers.
        seen: the directions of each tensor that were seen.
    """
    found: dict[str, NotSeen] = {}
    for path, module in quantized_modules(model):
        quantizers = [q for q in _quantizers(module) if q.plain_quantizers()[0].subject.tensor in TENSORS]
        if not quantizers:
            if not module.weight_names:
                continue  # a norm or an attention core, which has nothing of its own to quantize
            why = "in high precision: no recipe is in force" if module.has_run else "never called"
            found[module.name or path] = NotSeen(why)
            continue
        missing: dict[str, dict[str, str]] = defaultdict(dict)
        surprising: dict[str, bool] = {}
        for quantizer in quantizers:
            subject = quantizer.plain_quantizers()[0].subject
            name, tensor = names.name(subject) or path, subject.tensor
            lacking = [d.value for d in Direction if d.value not in seen.get((name, tensor), ())]
            if lacking:
                missing[name][tensor] = _why(quantizer, tensor, lacking)
            dark = len(lacking) == len(Direction) and not _is_identity(quantizer)
            surprising[name] = surprising.get(name, True) and dark
        for name, by_tensor in missing.items():
            found[name] = NotSeen(_joined(by_tensor), surprising[name])
    return found


def _why(quantizer: Any, tensor: str, lacking: list[str]) -> str:
    if _is_identity(quantizer):
        return "in high precision, by its recipe"
    for plain in quantizer.plain_quantizers():
        if plain.custom:
            return f"{type(plain).__name__} is a custom quantizer, whose planes cannot be seen"
    if len(lacking) == 1:
        return f"no {lacking[0]} plane was made"
    return _WHY[tensor]


def _is_identity(quantizer: Any) -> bool:
    return all(isinstance(plain, IdentityQuantizer) for plain in quantizer.plain_quantizers())


def _joined(by_tensor: Mapping[str, str]) -> str:
    """Reasons for the tensors of a layer; one reason if it is the same for all."""
    reasons = set(by_tensor.values())
    if len(by_tensor) == len(TENSORS) and len(reasons) == 1:
        return next(iter(reasons))
    return "; ".join(f"{tensor}: {why}" for tensor, why in by_tensor.items())


def _quantizers(module: QuantizedModule) -> list[Any]:
    return [quantizer for slots in module.quantizers.values() for quantizer in slots]
