"""`Network`: the parts of a model that cost something: linear layers, attention cores, other parameters, saved tensors.

It is made from the dimensions of a transformer, or from any ``nn.Module``, which may be on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import nn

from ..convert.accounting import known_projections
from ..convert.defaults import left_by_default
from ..convert.layers import Converted, ConvertedConv1D
from ..convert.projections import ConvertedProjections
from ..nn import GroupedLinear, QuantizedModule
from ..recipe import QuantizerRole
from ..recipe.binding import is_conv1d, layers_of
from ..recipe.projections import Projection, projections_of
from .models import LAB, Transformer, transformer_of

_UNIT = re.compile(r"^(.*?\.)?\d+(?=\.|$)")  # up to the first number of a path: a block


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, or several of one shape, as the experts of a mixture.

    Attributes:
        name: path of the layer.
        inputs: features of the input.
        outputs: features of the output.
        copies: number of weights [outputs, inputs].
        share: the part of the tokens that each of them gets.
        module_type: "linear" or "grouped_linear".
        cut: what tensor parallelism divides; None if every rank has the whole layer.
        stays: the layer stays in high precision, unless a rule of the recipe is for it.
        tied: the weight is a parameter that is counted elsewhere.
        after: the attention core whose output is the input. If both save it in high precision, it is counted once.
    """

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    share: Fraction = Fraction(1)
    module_type: str = "linear"
    cut: Literal["outputs", "inputs"] | None = None
    stays: bool = False
    tied: bool = False
    after: str = ""


@dataclass(frozen=True)
class Core:
    """An attention core: attention between the projections."""

    name: str
    heads: int
    kv_heads: int
    channels: int


@dataclass(frozen=True)
class Kept:
    """What another layer saves for backward, in numbers per token. ``itemsize`` 0 is that of the activations' dtype."""

    name: str
    elements: int
    itemsize: int = 0


@dataclass(frozen=True)
class Plain:
    """A parameter in high precision. ``cut`` says whether tensor parallelism divides it."""

    name: str
    shape: tuple[int, ...]
    cut: bool = False
    is_embedding: bool = False


@dataclass(frozen=True)
class Network:
    """The parts of a model.

    Attributes:
        name: name of the model.
        module: a module with the paths that rules of a recipe are matched with.
        layers: linear layers.
        plain: parameters in high precision.
        cores: attention cores.
        kept: what other layers save for backward.
        context: default length of sequences; 0 if it is not known.
        block_input: numbers per token of the input of a block; 0 if it is not known.
        notes: assumptions about the model.
    """

    name: str
    module: nn.Module
    layers: Sequence[LinearLayer]
    plain: Sequence[Plain]
    cores: Sequence[Core] = ()
    kept: Sequence[Kept] = ()
    context: int = 0
    block_input: int = 0
    notes: Sequence[str] = field(default_factory=list)


def unit_of(name: str) -> str:
    """The block that a layer belongs to, which is gathered and recomputed as a whole; "" if it is in none."""
    found = _UNIT.match(name)
    return found.group() if found else ""


def network_of(model: str | Transformer | nn.Module) -> Network:
    """Make a network from a name, dimensions as text or as a `Transformer`, or a module.

    Raises:
        TypeError: the model is none of these.
        ValueError: there is no such model, or a module has no linear layers.
    """
    if isinstance(model, nn.Module):
        return _of_module(model, type(model).__name__)
    if isinstance(model, Transformer):
        return _of_transformer(model, f"transformer of {model.layers} layers of {model.width}")
    if not isinstance(model, str):
        raise TypeError(
            f"a model must be a name, dimensions, a Transformer or an nn.Module, got {type(model).__name__}"
        )
    lab = _of_lab(model.strip())
    return lab if lab is not None else _of_transformer(transformer_of(model), model)


# ---- from dimensions -------------------------------------------------------------------------------


def _of_transformer(t: Transformer, name: str) -> Network:
    layers: list[LinearLayer] = []
    plain = [Plain("embedding.weight", (t.vocab, t.width), cut=True, is_embedding=True)]
    if t.biases:
        plain.append(Plain("places.weight", (t.context, t.width)))
    cores, kept = [], [Kept("tokens", 1, 8)]
    heads = (t.heads + 2 * t.key_heads) * t.channels
    norm = ["weight", "bias"] if t.biases else ["weight"]
    norms = ["norm."]
    ways = 2 if t.gated else 1
    for i in range(t.layers):
        block = f"layers.{i}."
        norms += [f"{block}norm1.", f"{block}norm2."]
        core = f"{block}attention.core"
        layers += [
            LinearLayer(f"{block}attention.qkv", t.width, heads, cut="outputs"),
            LinearLayer(f"{block}attention.proj", t.heads * t.channels, t.width, cut="inputs", after=core),
            *_mlp(t, f"{block}mlp."),
        ]
        cores.append(Core(core, t.heads, t.key_heads, t.channels))
        kept.append(Kept(f"{block}mlp.activation", ways * t.mlp * max(1, t.active)))
        if t.experts:
            kept += [Kept(f"{block}mlp.chances", t.experts, 4), Kept(f"{block}mlp.outputs", t.active * t.width)]
    if t.biases:
        plain += [
            Plain(f"{layer.name}.bias", (layer.outputs,), cut=layer.cut == "outputs")
            for layer in layers
            for _ in range(layer.copies)
        ]
    for path in norms:
        plain += [Plain(path + part, (t.width,)) for part in norm]
        kept += [Kept(f"{path}input", t.width), Kept(f"{path}statistics", len(norm), 4)]
    layers.append(LinearLayer("lm_head", t.width, t.vocab, cut="outputs", stays=True, tied=t.tied))
    kept.append(Kept("logits", t.vocab, 4))
    notes = [
        "q, k and v are one layer (qkv)"
        + (", and so are the two matrices of the first layer of the MLP (gate_up)." if t.gated else "."),
        "Attention is causal and does not store its scores; it saves q, k, v, its output, and a sum per head and "
        "token. Norms and activation functions save their inputs, the loss one fp32 number per token and entry of the "
        "vocabulary.",
    ]
    if t.experts:
        notes.append(
            f"Each token is sent to {t.active} of {t.experts} experts, and all experts get the same number of tokens."
        )
    skeleton = skeleton_of(
        [(layer.name, layer.module_type) for layer in layers] + [(core.name, "dpa") for core in cores]
    )
    return Network(name, skeleton, layers, plain, cores, kept, t.context, t.width, notes)


def _mlp(t: Transformer, path: str) -> list[LinearLayer]:
    into, ways = ("gate_up", 2) if t.gated else ("fc1", 1)
    out = "down" if t.gated else "fc2"
    if not t.experts:
        return [
            LinearLayer(path + into, t.width, ways * t.mlp, cut="outputs"),
            LinearLayer(path + out, t.mlp, t.width, cut="inputs"),
        ]
    experts: dict[str, Any] = {
        "copies": t.experts,
        "share": Fraction(t.active, t.experts),
        "module_type": "grouped_linear",
    }
    return [
        LinearLayer(f"{path}router", t.width, t.experts, stays=True),
        LinearLayer(f"{path}experts.{into}", t.width, ways * t.mlp, cut="outputs", **experts),
        LinearLayer(f"{path}experts.{out}", t.mlp, t.width, cut="inputs", **experts),
    ]


class _Named(nn.Module):
    """A layer without content, which rules of recipes are matched with."""

    def __init__(self, name: str, module_type: str) -> None:
        super().__init__()
        self.name, self.module_type = name, module_type

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole]:
        return [QuantizerRole(self.module_type, "qkv" if self.module_type == "dpa" else "input", self.name)]


def skeleton_of(names: Sequence[tuple[str, str]]) -> nn.Module:
    """A module without content that has layers with these names and types, which a recipe can be bound to."""
    model: Any = nn.Module()
    for name, module_type in names:
        *path, last = name.split(".")
        home = model
        for at, part in enumerate(path):
            if part not in home._modules:
                counts = path[at + 1 : at + 2] and path[at + 1].isdigit()
                home.add_module(part, nn.ModuleList() if counts else nn.Module())
            home = home._modules[part]
        home.add_module(last, _Named(name, module_type))
    whole: nn.Module = model
    return whole


# ---- from modules ----------------------------------------------------------------------------------


def _of_lab(name: str) -> Network | None:
    from ..gpt.model import GPT
    from ..gpt.training import PRESETS

    if name.removeprefix(LAB) not in PRESETS or not name.startswith(LAB):
        return None
    config = PRESETS[name.removeprefix(LAB)].model
    with torch.device("meta"):
        found = _of_module(GPT(config), name)
    return Network(name, found.module, found.layers, found.plain, context=config.context, notes=found.notes)


def _of_module(module: nn.Module, name: str) -> Network:
    layers: list[LinearLayer] = []
    taken: set[int] = set()
    staying = left_by_default(module)
    for path, part in module.named_modules():
        stays = path in staying and (isinstance(part, Converted) or not isinstance(part, QuantizedModule))
        layers += [replace(layer, stays=stays) for layer in _layers_in(part, path, name, taken)]
    if not layers:
        raise ValueError(f"this {name} has no linear layers, so there is nothing to plan")
    plain = [Plain(path, tuple(p.shape)) for path, p in module.named_parameters() if id(p) not in taken]
    notes = [
        "Every linear layer gets every token. What other layers save and compute is not known, and is not counted."
    ]
    return Network(name, module, layers, plain, notes=notes)


def _layers_in(part: nn.Module, path: str, model: str, taken: set[int]) -> Iterator[LinearLayer]:
    """The linear layers that a module has itself. ``taken`` are the weights that were found before."""
    projections = known_projections(part)
    if projections:
        yield from _projected(part, path, projections)
        taken |= {id(projection.parameter(part)) for projection in projections}
        return
    weights = _weights(part)
    if not weights:
        return
    names = [".".join(filter(None, (path, layer.name))) for layer in layers_of(part)]
    shapes: list[tuple[int, int]] = [tuple(weight.shape) for weight in weights]
    outputs, inputs = shapes[0]
    if isinstance(part, GroupedLinear):
        share = Fraction(1, len(shapes))
        yield LinearLayer(names[0], inputs, outputs, len(shapes), share, "grouped_linear")
    elif isinstance(part, ConvertedConv1D) or is_conv1d(part):
        yield LinearLayer(names[0], outputs, inputs, tied=id(weights[0]) in taken)  # stored as [inputs, outputs]
    elif len(names) == len(weights):
        for layer, (outputs, inputs), weight in zip(names, shapes, weights, strict=True):
            yield LinearLayer(layer, inputs, outputs, tied=id(weight) in taken)
    elif len(names) == 1:  # one layer, whose weight is several parameters
        yield LinearLayer(names[0], inputs, sum(rows for rows, _ in shapes))
    else:
        raise ValueError(
            f"{path or model}: {type(part).__name__} has {len(weights)} weights for {len(names)} layers, which plan "
            "does not know how to count"
        )
    taken |= {id(weight) for weight in weights}


def _projected(part: nn.Module, path: str, projections: Sequence[Projection]) -> Iterator[LinearLayer]:
    """The projections of a module that has no layers of its own, such as fused experts."""
    convertible = isinstance(part, ConvertedProjections) or bool(projections_of(part))
    if not convertible:
        return
    for projection in projections:
        outputs, inputs = projection.matrices(part).shape[-2:]
        copies = projection.groups or 1
        share = Fraction(projection.used, copies)
        yield LinearLayer(projection.path_in(path), inputs, outputs, copies, share, projection.module_type)


def _weights(part: nn.Module) -> list[Any]:
    if isinstance(part, QuantizedModule):
        return [getattr(part, name) for name in part.weight_names]
    return [part.weight] if isinstance(part, nn.Linear) or is_conv1d(part) else []
