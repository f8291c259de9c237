"""`FormatSpec`: a format with its options, as a recipe's text names it: ``nvfp4(rht, sr)``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from ..formats import IDENTITY, Format, fp8_format, get_format
from ..formats.dtypes import DType
from ..formats.encoding import RandomSource, check_random_source
from ..planes import Direction
from ..quantizers.any_format import FormatQuantizer
from ..quantizers.base import Quantizer
from ..quantizers.by_format import quantizer_of
from ..quantizers.float8 import Float8CurrentScalingQuantizer
from ..quantizers.float8_block import Float8BlockQuantizer
from ..quantizers.identity import IdentityQuantizer
from ..quantizers.mxfp8 import MXFP8Quantizer
from ..quantizers.nvfp4 import NVFP4Quantizer
from ..quantizers.request import QuantizerRequest
from .params import FP8Format as Elements
from .requests import DelayedScalingRequest
from .syntax import Call, RecipeSyntaxError, did_you_mean, parse_call
from .variants import Registered, names_of_variants, options_of_format, quantizer_class, registered, variant


@dataclass(frozen=True)
class Delayed:
    """The option ``delayed(history=16, algo=most_recent)``: scales are computed from the amaxes of earlier steps.

    Attributes:
        history: number of steps in the history.
        algo: "max" of the history, or "most_recent".
        margin: divide scales by ``2**margin``.
        reduce: take the largest amax over ranks.
    """

    history: int = 1024
    algo: str = "max"
    margin: int = 0
    reduce: bool = True

    def __post_init__(self) -> None:
        if self.algo not in ("max", "most_recent"):
            raise ValueError(f"algo must be max or most_recent, got {self.algo!r}")
        if self.history < 1:
            raise ValueError(f"history must be at least one step, got {self.history}")


@dataclass(frozen=True)
class FourOverSix:
    """The option ``4over6(mse, max=448)``: each block uses the better of two scales.

    Attributes:
        error: which scale is better: "mae" compares mean absolute errors, "mse" mean squared errors.
        max: upper bound of the scale that maps the largest number of a block to 6: 256 or 448.
    """

    error: str = "mae"
    max: int = 256

    def __post_init__(self) -> None:
        if self.error not in ("mae", "mse"):
            raise ValueError(f"the error must be mae or mse, got {self.error!r}")
        if self.max not in (256, 448):
            raise ValueError(f"max must be 256 or 448, got {self.max}")


@dataclass(frozen=True)
class StochasticRounding:
    """The option ``sr`` or ``sr(philox)``: round stochastically.

    Attributes:
        random: where random bits come from: "hash", or "philox" as on a GPU.
    """

    random: RandomSource = "hash"

    def __post_init__(self) -> None:
        check_random_source(self.random, stochastic=True)


# The name of each option, the field that it sets, and the value. A type means that the option has a value or arguments.
_OPTIONS: dict[str, tuple[str, Any]] = {
    "e4m3": ("element", "e4m3"),
    "e5m2": ("element", "e5m2"),
    "2d": ("two_d", True),
    "row_scaled": ("row_scaled", True),
    "rht": ("rht", True),
    "sr": ("sr", StochasticRounding),
    "4over6": ("four_over_six", FourOverSix),
    "pow2": ("pow2", True),
    "f32_scales": ("f32_scales", True),
    "eps": ("eps", float),
    "delayed": ("delayed", Delayed),
    "bf16": ("dtype", "bf16"),
    "fp16": ("dtype", "fp16"),
    "fp32": ("dtype", "fp32"),
}

# Further names, which are not names of registered formats.
_SYNONYMS: dict[str, str] = {
    "identity": "hp",
    "high_precision": "hp",
    "bf16": "hp(bf16)",
    "fp16": "hp(fp16)",
    "fp32": "hp(fp32)",
    "fp8_e4m3": "fp8",
    "mxfp8_e4m3": "mxfp8",
    "nvfp4_max256": "nvfp4(4over6)",
    "nvfp4_max256_2d": "nvfp4(2d, 4over6)",
}
_HIGH_PRECISION = "hp"  # what a recipe calls the format "identity"

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class FormatSpec:
    """A format with its options: ``FormatSpec.parse("nvfp4(rht, sr)")``. `str` returns the text again.

    Options that exclude each other raise an error only in `quantizer`, not here: in a recipe for whole GEMMs, ``2d``
    and ``rht`` may stand together, because one is for the weight and the other for wgrad.

    Attributes:
        format: name of the format: one of `format_names`.
        element: "e4m3" or "e5m2".
        two_d: option ``2d``: one scale per square tile.
        row_scaled: one scale per row above the scales of blocks.
        rht: rotate columnwise data by a random Hadamard transform.
        sr: option ``sr``: stochastic rounding; None without it.
        four_over_six: option ``4over6``; None without it.
        pow2: scales are powers of two.
        f32_scales: scales are any fp32 numbers instead of powers of two.
        eps: smallest amax that is used to compute a scale.
        delayed: option ``delayed``; None without it.
        dtype: "bf16", "fp16" or "fp32" for ``hp``; None to keep the dtype of the tensor.

    Raises:
        ValueError: there is no such format, or it does not have an option that is set.

    Examples:
        >>> spec = cg.recipe.FormatSpec.parse("nvfp4(rht, sr)")
        >>> str(spec), spec.rht
        ('nvfp4(rht, sr)', True)
    """

    format: str
    element: str = "e4m3"
    two_d: bool = False
    row_scaled: bool = False
    rht: bool = False
    sr: StochasticRounding | None = None
    four_over_six: FourOverSix | None = None
    pow2: bool = False
    f32_scales: bool = False
    eps: float = 0.0
    delayed: Delayed | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.format not in format_names():
            raise ValueError(f"there is no format {self.format!r}{did_you_mean(self.format, format_names())}")
        if not (self.eps >= 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be a finite number >= 0, got {self.eps}")
        allowed = {_OPTIONS[option][0] for option in options_of(self.format)}
        for field in self.set_fields():
            if field not in allowed:
                raise ValueError(f"{self.format} has no option {field!r}")

    def set_fields(self) -> list[str]:
        """Names of the fields that do not have their default values."""
        return [f.name for f in fields(self) if f.default is not MISSING and getattr(self, f.name) != f.default]

    def without(self, names: Iterable[str]) -> FormatSpec:
        """Return the same format with these fields set to their default values."""
        names = set(names)
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in names}
        return replace(self, **defaults)

    # ---- text ----------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str | FormatSpec) -> FormatSpec:
        """Parse a text like ``nvfp4(rht, sr)``.

        Args:
            text: the text; a FormatSpec is returned as it is.

        Raises:
            TypeError: it is neither text nor a FormatSpec.
            RecipeSyntaxError: it is not a format with options; the message points at the mistake.
        """
        if isinstance(text, FormatSpec):
            return text
        if not isinstance(text, str):
            raise TypeError(f"a format must be written as text, like 'mxfp8', got {type(text).__name__}")
        call, others = parse_call(text), aliases()
        if call.name not in others and call.name not in format_names():
            call = replace(call, name=call.name.lower())  # as in MXFP8
        base = parse_call(others[call.name]) if call.name in others else Call(call.name, call.start, call.end)
        if base.name not in format_names():
            known = [*format_names(), *others]
            raise RecipeSyntaxError(
                f"there is no format {call.name!r}{did_you_mean(call.name, known)}", text, call.start, call.end
            )
        if call.value is not None:
            raise RecipeSyntaxError(
                f"write the options of {call.name} in parentheses, like nvfp4(sr)", text, call.start, call.end
            )
        options: dict[str, Any] = {}
        for where, option in [("", option) for option in base.args] + [(text, option) for option in call.args]:
            field, value = _option(base.name, option, where)
            if field in options:
                raise RecipeSyntaxError(
                    f"{call.name} already has the option {option_name(field)}", text, option.start, option.end
                )
            options[field] = value
        try:
            return cls(base.name, **options)
        except ValueError as error:
            raise RecipeSyntaxError(str(error), text, call.start, call.end) from None

    def __str__(self) -> str:
        options = []
        for option in options_of(self.format):
            field, wanted = _OPTIONS[option]
            value = getattr(self, field)
            if field not in self.set_fields():
                continue
            if wanted is float:
                options.append(f"{option}={value!r}")
            elif isinstance(wanted, type):
                options.append(option + _arguments(value))
            elif value == wanted:
                options.append(option)
        return f"{self.format}({', '.join(options)})" if options else self.format

    # ---- what it means -------------------------------------------------------------------------

    def quantizer(self, tensor: str | None = None) -> Quantizer | QuantizerRequest:
        """Make a new quantizer of this format.

        Args:
            tensor: "input", "weight" or "grad_output". With it, a request names both FP8 types of the usual pair
                (`FP8Format.HYBRID`) where that is equivalent.

        Returns:
            A quantizer; with the option ``delayed``, a request for one, because it needs a history.

        Raises:
            ValueError: options exclude each other.
        """
        if self.delayed is not None:
            return self._delayed_request(self.delayed, tensor)
        try:
            return self._quantizer()
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from None

    def stored_format(self, direction: Direction) -> Format:
        """The format of the bytes in one direction.

        Raises:
            ValueError: options exclude each other.
        """
        if self.delayed is not None:
            self._refuse_options_of_current_scaling()
            return fp8_format(self._fp8_dtype.element)
        return _stored_format(self, direction, registered())

    def _quantizer(self) -> Quantizer:
        fmt = _format(self.format)
        made_by = quantizer_class(fmt)
        if made_by is IdentityQuantizer:
            return IdentityQuantizer(dtype=_DTYPES[self.dtype] if self.dtype else None)
        if made_by is Float8CurrentScalingQuantizer:
            return Float8CurrentScalingQuantizer(self._fp8_dtype, force_pow_2_scales=self.pow2, amax_epsilon=self.eps)
        if made_by is Float8BlockQuantizer:
            return Float8BlockQuantizer(
                self._fp8_dtype,
                rowwise=True,
                columnwise=True,
                amax_epsilon=self.eps,
                force_pow_2_scales=not self.f32_scales,
                block_scaling_dim=2 if self.two_d else 1,
            )
        if made_by is MXFP8Quantizer:
            return MXFP8Quantizer(self._fp8_dtype, with_2d_quantization=self.two_d)
        if made_by is NVFP4Quantizer:
            four_over_six = self.four_over_six or FourOverSix()
            rounding = self.sr or StochasticRounding()
            return NVFP4Quantizer(
                with_rht=self.rht,
                with_post_rht_amax=self.rht,
                with_2d_quantization=self.two_d,
                stochastic_rounding=self.sr is not None,
                random_source=rounding.random,
                row_scaled_nvfp4=self.row_scaled,
                nvfp4_use_4over6=self.four_over_six is not None,
                nvfp4_e4m3_max=four_over_six.max,
                nvfp4_4over6_err_mode="MSE" if four_over_six.error == "mse" else "MAE",
            )
        chosen = variant(fmt, element=self.element, two_d=self.two_d, row_scaled=self.row_scaled)
        if chosen is None:
            raise ValueError("no format is registered for these options together")
        if self.sr is None:
            return quantizer_of(chosen)
        return FormatQuantizer(chosen, stochastic_rounding=True, random_source=self.sr.random)

    @property
    def _fp8_dtype(self) -> DType:
        return DType.kFloat8E5M2 if self.element == "e5m2" else DType.kFloat8E4M3

    def _refuse_options_of_current_scaling(self) -> None:
        if self.pow2 or self.eps:
            raise ValueError(f"{self}: pow2 and eps are options of current scaling and cannot be used with delayed")

    def _delayed_request(self, delayed: Delayed, tensor: str | None) -> QuantizerRequest:
        self._refuse_options_of_current_scaling()
        # All requests of a module in one pass must be equal, and other recipes request the hybrid pair.
        usual = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
        name = "HYBRID" if usual.get(tensor or "") == self.element else self.element.upper()
        return DelayedScalingRequest(
            fp8_format=Elements[name],
            margin=delayed.margin,
            amax_history_len=delayed.history,
            amax_compute_algo="max" if delayed.algo == "max" else "most_recent",
            reduce_amax=delayed.reduce,
        )


def format_names() -> tuple[str, ...]:
    """The names of formats in recipes: all registered formats except those that are another format with options."""
    return _format_names(registered())


def aliases() -> Mapping[str, str]:
    """Other names of formats, and what they mean: ``{"mxfp8_2d": "mxfp8(2d)", ...}``."""
    return _aliases(registered())


def options_of(format: str) -> tuple[str, ...]:
    """Names of the options that a format has, in the order in which `str` writes them."""
    return _options_of(format, registered())


# Many specs are made while the formats of layers are computed, so what follows from the registry is found once for
# each content of it.


@lru_cache(maxsize=16)
def _format_names(known: Registered) -> tuple[str, ...]:
    others = _aliases(known)
    return (_HIGH_PRECISION, *(fmt.name for fmt in known.formats if fmt.name not in others))


@lru_cache(maxsize=16)
def _aliases(known: Registered) -> Mapping[str, str]:
    return MappingProxyType({**names_of_variants(), **_SYNONYMS})


@lru_cache(maxsize=256)
def _options_of(format: str, known: Registered) -> tuple[str, ...]:
    found = options_of_format(_format(format))
    return tuple(option for option in _OPTIONS if option in found)


@lru_cache(maxsize=8192)
def _stored_format(spec: FormatSpec, direction: Direction, known: Registered) -> Format:
    quantizer = spec.quantizer()
    assert isinstance(quantizer, Quantizer)
    return quantizer.encoding(direction).format


def _format(name: str) -> Format:
    return IDENTITY if name == _HIGH_PRECISION else get_format(name)


def option_name(field: str) -> str:
    """The name of the option that sets a field: ``4over6`` for ``four_over_six``."""
    names = [option for option, (name, _) in _OPTIONS.items() if name == field]
    return names[0] if len(names) == 1 else "/".join(names)


def _option(format: str, call: Call, text: str) -> tuple[str, Any]:
    """Field and value of one option."""
    call = replace(call, name=call.name.lower())
    if call.name not in options_of(format):
        hint = did_you_mean(call.name, options_of(format))
        raise RecipeSyntaxError(f"{format} has no option {call.name!r}{hint}", text, call.start, call.end)
    field, wanted = _OPTIONS[call.name]
    try:
        if wanted is float:
            if call.value is None or call.args:
                raise ValueError(f"{call.name} needs a value, like {call.name}=1e-6")
            return field, _number(call.value, float)
        if call.value is not None:
            raise ValueError(f"the option {call.name} has no value")
        if isinstance(wanted, type):
            return field, _group(wanted, call, text)
        if call.args:
            raise ValueError(f"the option {call.name} has no options of its own")
        return field, wanted
    except RecipeSyntaxError:
        raise
    except ValueError as error:
        raise RecipeSyntaxError(str(error), text, call.start, call.end) from None


def _group(kind: type, call: Call, text: str) -> Any:
    """An option with arguments: ``delayed(history=16)``. A bare word is the value of the first text argument."""
    defaults = {field.name: field.default for field in fields(kind)}
    first_text = next(name for name, default in defaults.items() if isinstance(default, str))
    given: dict[str, Any] = {}
    for arg in call.args:
        name, word = (first_text, arg.name) if arg.value is None else (arg.name, arg.value)
        if name not in defaults:
            hint = did_you_mean(name, defaults)
            raise RecipeSyntaxError(f"{call.name} has no argument {name!r}{hint}", text, arg.start, arg.end)
        if name in given:
            raise RecipeSyntaxError(f"{call.name} already has a value for {name}", text, arg.start, arg.end)
        try:
            given[name] = _number(word, type(defaults[name]))
            kind(**given)  # checks the values; here it is still known which argument is wrong
        except ValueError as error:
            raise RecipeSyntaxError(str(error), text, arg.start, arg.end) from None
    return kind(**given)


def _arguments(group: Any) -> str:
    values = {f.name: getattr(group, f.name) for f in fields(group) if getattr(group, f.name) != f.default}
    first = fields(group)[0].name
    words = [
        value if name == first and isinstance(value, str) else f"{name}={str(value).lower()}"
        for name, value in values.items()
    ]
    return f"({', '.join(words)})" if words else ""


def _number(word: str, kind: type) -> Any:
    if kind is str:
        return word
    if kind is bool:
        if word not in ("true", "false"):
            raise ValueError(f"expected true or false, got {word!r}")
        return word == "true"
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"expected a number, got {word!r}") from None
