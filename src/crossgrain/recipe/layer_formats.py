"""`LayerFormats`: the format of each direction of each tensor of one layer, from the settings of a recipe.

Settings are pairs of a key and a value:

    all                 a format for all three GEMMs
    fprop               a format for both operands of a GEMM; each option goes to the operands that it is meant for
    fprop.weight        a format for one operand of a GEMM, with exactly these options
    weight.source       what the columnwise plane of a tensor is made from: original, dequantized or dequantized_late
    attention           a format for the tensors of an attention core
    attention.s         a format for one of them, with exactly these options
    nonfinite           what to do about NaNs and infinities: propagate, raise or saturate
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ..gemm.operands import GEMMS, TENSORS, check_operands
from ..planes import COLUMNWISE, ROWWISE, Direction
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..quantizers.nonfinite import POLICIES
from ..quantizers.request import QuantizerRequest
from .format_spec import FormatSpec, option_name
from .syntax import RecipeSyntaxError, did_you_mean

ATTENTION = ("qkv", "s", "o", "do", "dp", "dqkv")
SOURCES = {  # and what a hybrid quantizer calls them
    "original": "original",
    "dequantized": "rowwise_dequantized",
    "dequantized_late": "rowwise_dequantized_late",
}

_PLACES: dict[str, tuple[str, ...]] = {**{gemm: tuple(operands) for gemm, operands in GEMMS.items()}}
_PLACES["attention"] = ATTENTION
_GRADIENTS = ("grad_output", "do", "dp", "dqkv")

KEYS = (
    "all",
    *GEMMS,
    *(f"{gemm}.{tensor}" for gemm in GEMMS for tensor in GEMMS[gemm]),
    *(f"{tensor}.source" for tensor in TENSORS),
    "attention",
    *(f"attention.{tensor}" for tensor in ATTENTION),
    "nonfinite",
)

Settings = tuple[tuple[str, "FormatSpec | str"], ...]  # in the order of KEYS


# ---- what options mean -----------------------------------------------------------------------------


def _applies(field: str, place: str, tensor: str) -> bool:
    """Whether an option that is set for a GEMM is meant for this operand of it."""
    match field:
        case "sr" | "element":
            return tensor in _GRADIENTS
        case "two_d":
            return tensor == "weight"
        case "row_scaled":
            return tensor == "input"
        case "rht":
            return place == "wgrad"
    return True


_MEANT_FOR = {
    "sr": "the gradient operand",
    "element": "the gradient operand",
    "two_d": "the weight operand",
    "row_scaled": "the input operand",
    "rht": "the operands of wgrad, because only columnwise data is rotated",
}


def _unused(spec: FormatSpec, place: str) -> list[str]:
    return [f for f in spec.set_fields() if not any(_applies(f, place, tensor) for tensor in _PLACES[place])]


@lru_cache(maxsize=4096)
def operands_of(spec: FormatSpec, place: str) -> Mapping[str, FormatSpec]:
    """The operands of a GEMM (or of attention), with those options of ``spec`` that are meant for each.

    >>> operands_of(FormatSpec.parse("nvfp4(rht, sr)"), "wgrad")
    {"grad_output": nvfp4(rht, sr), "input": nvfp4(rht)}
    """
    return MappingProxyType(
        {
            tensor: spec.without(f for f in spec.set_fields() if not _applies(f, place, tensor))
            for tensor in _PLACES[place]
        }
    )


@lru_cache(maxsize=4096)
def gemms_of(spec: FormatSpec) -> Mapping[str, FormatSpec]:
    """The three GEMMs, with those options of ``spec`` that have a meaning in each."""
    return MappingProxyType({gemm: spec.without(_unused(spec, gemm)) for gemm in GEMMS})


# ---- settings --------------------------------------------------------------------------------------


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Parse and check settings; they are returned in the order of `KEYS`."""
    made = {key: make_setting(key, value) for key, value in values.items()}
    return tuple((key, made[key]) for key in KEYS if key in made)


def make_setting(key: str, value: Any) -> FormatSpec | str:
    """Parse and check the value of one setting.

    Raises:
        ValueError: there is no such key, or the value cannot be used for it.
    """
    if key not in KEYS:
        raise ValueError(f"there is no setting {key!r}{did_you_mean(key, KEYS)}")
    if key.endswith(".source"):
        if value not in SOURCES:
            raise ValueError(f"{key} must be original, dequantized or dequantized_late, got {value!r}")
        if value == "dequantized_late" and key == "grad_output.source":
            raise ValueError(
                f"{key} cannot be dequantized_late: both planes of a gradient are read in the backward pass that makes "
                "them. Use dequantized"
            )
        return str(value)
    if key == "nonfinite":
        if value not in POLICIES:
            raise ValueError(f"nonfinite must be {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, got {value!r}")
        return str(value)
    spec = FormatSpec.parse(value)
    try:
        _check_spec(key, spec)
    except ValueError as error:
        if isinstance(value, str):
            raise RecipeSyntaxError(str(error), value) from None
        raise
    return spec


@lru_cache(maxsize=1024)
def _check_spec(key: str, spec: FormatSpec) -> None:
    """Raise ValueError if a format cannot be used for one of the operands that the key stands for."""
    place, _, tensor = key.partition(".")
    if tensor:
        chosen: dict[str, Mapping[str, FormatSpec]] = {place: {tensor: spec}}
    elif key == "all":
        chosen = {gemm: operands_of(narrowed, gemm) for gemm, narrowed in gemms_of(spec).items()}
    else:
        for field in _unused(spec, place):
            raise ValueError(f"{option_name(field)} is meant for {_MEANT_FOR[field]}, which {place} does not have")
        chosen = {place: operands_of(spec, place)}
    for place, operands in chosen.items():
        for tensor, operand in operands.items():
            direction = GEMMS.get(place, {}).get(tensor, ROWWISE)
            if operand.rht and direction is ROWWISE:
                raise ValueError(f"{place} reads {tensor} rowwise, but rht rotates only columnwise data")
            if operand.delayed and operand.element == "e5m2" and tensor not in _GRADIENTS:
                raise ValueError(f"delayed scaling in E5M2 is for gradients, not for {tensor}")
            operand.stored_format(direction)


# ---- one layer -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A chosen format or source, and the setting that decided it: ``rule 1 (*.head)``."""

    value: Any
    why: str


@dataclass(frozen=True)
class LayerFormats:
    """The formats of one layer, by (GEMM or "attention", tensor), and the sources of columnwise planes, by tensor.

    ``nonfinite`` is what to do about NaNs and infinities; None if no setting says it.
    """

    formats: tuple[tuple[tuple[str, str], Choice], ...]
    sources: tuple[tuple[str, Choice], ...]
    nonfinite: Choice | None = None

    def format(self, place: str, tensor: str) -> Choice:
        """The format of one operand: ``format("dgrad", "weight")``."""
        return dict(self.formats)[place, tensor]

    def source(self, tensor: str) -> Choice:
        """What the columnwise plane of a tensor is made from: a key of `SOURCES`."""
        return dict(self.sources)[tensor]

    def format_in(self, tensor: str, direction: Direction) -> Choice:
        """The format of one direction of a tensor. Exactly one GEMM reads it."""
        place = next(gemm for gemm, operands in GEMMS.items() if operands.get(tensor) is direction)
        return self.format(place, tensor)

    def quantizer(self, tensor: str) -> Quantizer | QuantizerRequest:
        """Make a quantizer for a tensor; a hybrid quantizer if its two directions have different formats."""
        if tensor in ATTENTION:
            return self._spec("attention", tensor).quantizer("grad_output" if tensor in _GRADIENTS else "input")
        row: FormatSpec = self.format_in(tensor, ROWWISE).value
        column: FormatSpec = self.format_in(tensor, COLUMNWISE).value
        source: Any = SOURCES[self.source(tensor).value]
        unrotated = column.without(["rht"])  # a quantizer rotates its columnwise data only
        if row == unrotated and (source == "original" or row.format == "hp"):
            return column.quantizer(tensor)
        return HybridQuantizer(
            rowwise_quantizer=row.quantizer(tensor),
            columnwise_quantizer=column.quantizer(tensor),
            columnwise_source=source,
        )

    def check_pairs(self, layer: str, gemms: Iterable[str] = GEMMS) -> None:
        """Check that the two operands of each of these GEMMs can be multiplied without decoding.

        Raises:
            ValueError: they cannot.
        """
        for gemm in gemms:
            operands = GEMMS[gemm].items()
            check_operands(gemm, [(t, d, self._spec(gemm, t).stored_format(d)) for t, d in operands], layer)

    def without_reasons(self) -> LayerFormats:
        """The same formats and sources, without who decided them: equal for all layers that have the same."""
        formats = tuple((place, Choice(choice.value, "")) for place, choice in self.formats)
        sources = tuple((tensor, Choice(choice.value, "")) for tensor, choice in self.sources)
        return LayerFormats(formats, sources, self.nonfinite and Choice(self.nonfinite.value, ""))

    def _spec(self, place: str, tensor: str) -> FormatSpec:
        spec = self.format(place, tensor).value
        assert isinstance(spec, FormatSpec)
        return spec


@lru_cache(maxsize=1024)
def make_layer_formats(stages: tuple[tuple[str, Settings], ...]) -> LayerFormats:
    """Apply stages of settings one after the other. Each stage has a label that says where it comes from.

    A stage changes only what it names. Within a stage, a setting for one operand is stronger than one for a GEMM, and
    that is stronger than ``all``. Setting a GEMM replaces both of its operands. Setting ``all`` replaces everything
    about the three GEMMs, also the sources.
    """
    formats: dict[tuple[str, str], Choice] = {}
    sources = {tensor: Choice("original", "default") for tensor in TENSORS}
    nonfinite = None
    for label, settings in stages:
        for key, value in settings:  # from the general to the special, as KEYS are
            place, _, tensor = key.partition(".")
            why = f"{label}: {key}" if tensor else label
            if key == "nonfinite":
                nonfinite = Choice(value, why)
            elif isinstance(value, str):
                sources[place] = Choice(value, why)
            elif tensor:
                formats[place, tensor] = Choice(value, why)
            elif key == "all":
                sources = {name: Choice("original", why) for name in TENSORS}
                for gemm, spec in gemms_of(value).items():
                    formats.update(_choices(gemm, spec, why))
            else:
                formats.update(_choices(place, value, why))
    return LayerFormats(tuple(formats.items()), tuple(sources.items()), nonfinite)


def _choices(place: str, spec: FormatSpec, why: str) -> Iterable[tuple[tuple[str, str], Choice]]:
    return [((place, tensor), Choice(operand, why)) for tensor, operand in operands_of(spec, place).items()]
