"""`GemmRecipe`: the formats of fprop, dgrad and wgrad, with exceptions for operands and layers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from torch import nn

from ..gemm.operands import GEMMS, TENSORS
from ..quantizers.base import Quantizer
from ..quantizers.identity import IdentityQuantizer
from ..quantizers.nonfinite import Policy
from ..quantizers.request import QuantizerRequest
from .base import BackwardOverride, Recipe
from .binding import bind_all, check_names, layers_of
from .document import OPTIONS, Document, make_option
from .files import is_recipe_path, read_mapping, write_mapping
from .format_spec import FormatSpec
from .layer_formats import (
    ATTENTION,
    LayerFormats,
    Settings,
    gemms_of,
    make_layer_formats,
    make_settings,
)
from .mapping import document_of, make_rule, mapping_of
from .params import FP8Format
from .phases import PhaseRule, refuse_schedule
from .presets import PRESETS, preset_name, schedule_name
from .roles import QuantizerRole
from .rule_index import RuleIndex
from .rule_pairs import unpaired_rule
from .rules import ModuleType, Rule
from .syntax import did_you_mean
from .text import format_line, left_of_preset, parse_line, parse_rule

if TYPE_CHECKING:
    from .explain import Explanation

_NOT_SAID = {"attention": FormatSpec("hp"), **{f"{tensor}.source": "original" for tensor in TENSORS}}
_ATTENTION_NOT_SAID: Settings = (("attention", FormatSpec("hp")),)
_HINTS = {"dpa_output": "o", "dpa_grad_input": "dqkv"}
_LEAVING = tuple(_HINTS.values())  # what leaves an attention core
_FOUND_LATER = ("rule_index", "_known_formats", "_hash")  # cached, not a part of the value
_DEFAULTS = {"allow_mixed": False, "backward_override": None, "blocks": None}


class GemmRecipe(Recipe):
    """A recipe that says for each GEMM in which format its operands are.

    It is an immutable, hashable value.

    >>> recipe = GemmRecipe(fprop="mxfp8", dgrad="nvfp4(sr)", wgrad="nvfp4(rht, sr)", rules=["*.lm_head: hp"])
    >>> recipe == GemmRecipe.load("fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr); *.lm_head: hp")
    True

    Args:
        fprop: format of both operands of ``y = x · Wᵀ``. Options apply to the operands that they are meant for.
        dgrad: format of both operands of ``dx = dy · W``.
        wgrad: format of both operands of ``dW = dyᵀ · x``.
        operands: formats of single operands: ``{"fprop.weight": "nvfp4(2d)", "attention.s": "fp8"}``.
        sources: what the columnwise plane of a tensor is made from, by tensor: ``{"weight": "dequantized"}`` for the
            decoded rowwise plane, "original" (the default) for the tensor itself.
        attention: format of the tensors of attention cores.
        rules: exceptions for some layers: texts like ``"*.lm_head: hp"``, pairs of a pattern and a format or a mapping
            of settings, or `Rule` objects. Of several rules for a layer the last one wins.
        blocks: path (or pattern) of the module whose children "first 2 blocks" counts. Needed if the model has
            several such modules.
        allow_mixed: allow the two operands of a GEMM to have scales of different kinds. Such operands are decoded
            before they are multiplied.
        backward_override: None, or how backward GEMMs run in high precision: "high_precision" uses the operands as
            they were before quantization, "dequantized" uses the decoded quantized operands.
        nonfinite: what layers do about NaNs and infinities: "propagate", "raise" or "saturate" (see
            `quantizers.nonfinite`). None for what `settings` say.

    Raises:
        ValueError: a format, an option or a key does not exist, or the operands of a GEMM cannot be multiplied.
    """

    _kind: ClassVar[str] = "custom"
    immutable: ClassVar[bool] = True
    quantization_alignment: ClassVar[int] = 128
    fp8_format: ClassVar[FP8Format] = FP8Format.HYBRID

    settings: Settings
    rules: tuple[Rule, ...]
    blocks: str | None
    checked_with_model: bool = False  # rules were compared with a model; not a part of the value
    settings_by: tuple[tuple[str, Settings], ...] = ()  # where settings come from, for explanations; not a part either

    def __init__(
        self,
        fprop: str | FormatSpec,
        dgrad: str | FormatSpec,
        wgrad: str | FormatSpec,
        *,
        operands: Mapping[str, str | FormatSpec] | None = None,
        sources: Mapping[str, str] | None = None,
        attention: str | FormatSpec = "hp",
        rules: Iterable[Rule | PhaseRule | str | tuple[str, Any]] = (),
        blocks: str | None = None,
        allow_mixed: bool = False,
        backward_override: BackwardOverride = None,
        nonfinite: Policy | None = None,
    ) -> None:
        values: dict[str, Any] = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad, "attention": attention}
        for key, operand in (operands or {}).items():
            if "." not in key or key.endswith(".source"):
                raise ValueError(f"keys of operands must be like 'fprop.weight', got {key!r}")
            values[key] = operand
        values.update({f"{tensor}.source": source for tensor, source in (sources or {}).items()})
        if nonfinite is not None:
            values["nonfinite"] = nonfinite
        settings = make_settings(values)
        options = {"allow_mixed": allow_mixed, "backward_override": backward_override, "blocks": blocks}
        # Fields are written here and nowhere else: assignment raises.
        vars(self).update(
            settings=tuple(item for item in settings if item not in _NOT_SAID.items()),
            rules=tuple(_as_rule(rule) for rule in rules),
            **{key: make_option(key, value) for key, value in options.items()},
        )
        stages = (self.settings, *(rule.settings for rule in self.rules))
        vars(self).update(
            fp8_dpa=any(_quantizes_attention(settings, ATTENTION) for settings in stages),
            fp8_mha=any(_quantizes_attention(settings, _LEAVING) for settings in stages),
        )
        self._check_rules()

    # ---- parts ---------------------------------------------------------------------------------

    @property
    def fprop(self) -> FormatSpec:
        """The format of fprop, ``y = x · Wᵀ``."""
        return self._spec("fprop")

    @property
    def dgrad(self) -> FormatSpec:
        """The format of dgrad, ``dx = dy · W``."""
        return self._spec("dgrad")

    @property
    def wgrad(self) -> FormatSpec:
        """The format of wgrad, ``dW = dyᵀ · x``."""
        return self._spec("wgrad")

    @property
    def attention(self) -> FormatSpec:
        """The format of the tensors of attention cores."""
        return self._spec("attention")

    @property
    def nonfinite(self) -> Policy | None:  # type: ignore[override]
        """What layers do about NaNs and infinities, unless a rule says it; None for what `settings` say."""
        said: Any = dict(self.settings).get("nonfinite")
        return said  # type: ignore[no-any-return]

    def nonfinite_of(self, name: str, module_type: str) -> Policy | None:
        choice = self.layer_formats(name, module_type).nonfinite
        return None if choice is None else choice.value

    @property
    def set_options(self) -> dict[str, Any]:
        """The options of the whole recipe that do not have their default values."""
        return {key: getattr(self, key) for key in OPTIONS if getattr(self, key) != _DEFAULTS[key]}

    def may_keep_histories(self) -> bool:
        stages = (self.settings, *(rule.settings for rule in self.rules))
        values = [value for settings in stages for _, value in settings]
        return any(isinstance(value, FormatSpec) and value.delayed is not None for value in values)

    def _spec(self, key: str) -> FormatSpec:
        spec = {**_NOT_SAID, **dict(self.settings)}[key]
        assert isinstance(spec, FormatSpec)
        return spec

    # ---- a value -------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        remedy = "create another one"
        if name in ("fp8_dpa", "fp8_mha"):
            remedy += "; to quantize attention, add 'attention: mxfp8', or another format, to its text"
        raise FrozenInstanceError(f"{name} cannot be set: a GemmRecipe cannot be changed, {remedy}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"{name} cannot be deleted: a GemmRecipe cannot be changed, create another one")

    def _value(self) -> tuple[Any, ...]:
        return (self.settings, self.rules, self.allow_mixed, self.backward_override, self.blocks)

    def __eq__(self, other: object) -> bool:
        return self._value() == other._value() if isinstance(other, GemmRecipe) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    # ---- text and files ------------------------------------------------------------------------

    def __str__(self) -> str:
        return format_line(self.settings, self.rules, self.set_options)

    def __repr__(self) -> str:
        return f"GemmRecipe.load({str(self)!r})"

    @classmethod
    def load(cls, value: str | os.PathLike[str] | Mapping[str, Any] | GemmRecipe) -> Self:
        """Load a recipe.

        Args:
            value: the name of a preset, a recipe in one line of text, the path of a .yaml, .yml or .json file, or a
                mapping as in such a file. A GemmRecipe is returned as it is.

        Raises:
            TypeError: the value is none of these.
            ValueError: the text, file or mapping is not a recipe; `RecipeSyntaxError` points at the mistake.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if is_recipe_path(value):
            mapping = read_mapping(value)
            try:
                return cls.from_dict(mapping)
            except ValueError as error:
                raise ValueError(f"{value}: {error}") from error
        if not isinstance(value, str):
            raise TypeError(
                "a recipe must be the name of a preset, one line of text, the path of a file or a mapping, got "
                f"{type(value).__name__}"
            )
        recipe: Self = _of_line(cls, value)  # type: ignore[arg-type]  # classes are hashable
        return recipe

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Make a recipe from a mapping, as `to_dict` returns it. ``preset`` names a preset that the rest changes.

        Raises:
            ValueError: the mapping is not a recipe.
        """
        return cls.from_document(document_of(mapping))

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a mapping of strings, lists and dicts, as in a file."""
        return mapping_of(self.settings, self.rules, self.set_options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe to a .yaml, .yml or .json file."""
        write_mapping(self.to_dict(), path)

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Make a recipe of the parsed content of a text or a file."""
        settings: dict[str, Any] = {}
        rules = document.rules
        options = document.options
        if document.preset is not None:
            name = preset_name(document.preset)
            if name is None and schedule_name(document.preset) is not None:
                refuse_schedule(f"the preset '{document.preset}'")
            if name is None:
                raise ValueError(f"there is no preset {document.preset!r}{did_you_mean(document.preset, PRESETS)}")
            base = cls.from_document(parse_line(PRESETS[name].line))
            settings = left_of_preset(dict(base.settings), document.settings)
            rules, options = [*base.rules, *rules], {**base.set_options, **options}
        settings.update(document.settings)
        if isinstance(everything := settings.pop("all", None), FormatSpec):
            settings = {**gemms_of(everything), **settings}
        missing = [gemm for gemm in GEMMS if gemm not in settings]
        if missing:
            raise ValueError(f"{missing[0]} is not set; write '{missing[0]}: hp' to keep it in high precision")
        return cls(
            **{gemm: settings.pop(gemm) for gemm in GEMMS},
            attention=settings.pop("attention", "hp"),
            nonfinite=settings.pop("nonfinite", None),
            operands={key: value for key, value in settings.items() if not key.endswith(".source")},
            sources={key.partition(".")[0]: value for key, value in settings.items() if key.endswith(".source")},
            rules=rules,
            **options,
        )

    # ---- what it means for a layer -------------------------------------------------------------

    def qfactory(self, role: QuantizerRole | None) -> Quantizer | QuantizerRequest:
        """Make a new quantizer for a role, or a request for one.

        Tensors that no GEMM of the module reads, such as its outputs, stay in high precision.
        """
        tensor, module_type, name = _tensor_of(role)
        return IdentityQuantizer() if tensor is None else self.layer_formats(name, module_type).quantizer(tensor)

    def layer_formats(self, name: str, module_type: str = "linear") -> LayerFormats:
        """The formats of one layer: for each operand of each GEMM, and which setting decided.

        Args:
            name: name of the layer, which the patterns of rules are matched with.
            module_type: type of the layer: "linear", "grouped_linear" or "dpa" (attention core).

        Raises:
            ValueError: the operands of a GEMM cannot be multiplied; or a rule is for blocks, which are known only
                after `for_model`.
        """
        known = self._known_formats.get((name, module_type))
        if known is None:
            stages = self._stages(self.rule_index.rules(name, module_type))
            known = _checked_formats(stages, self._gemms_to_check(), name)
            self._known_formats[name, module_type] = known
        return known

    def names_layer(self, name: str, module_type: str = "linear") -> bool:
        """Whether a rule names this layer: by a pattern for its path that does not end in ``*`` for anything there.

        Layers that stay in high precision by default, such as output heads, follow a recipe that names them.
        """
        return self.rule_index.names(name)

    def for_model(self, model: nn.Module, blocks: str | None = None) -> GemmRecipe:
        """Check this recipe with a model, and fill in the paths of its blocks ("first 2 blocks").

        Args:
            model: the model.
            blocks: path (or pattern) of the module whose children are the blocks; by default that of the recipe.

        Returns:
            The recipe with the paths of its blocks.

        Raises:
            ValueError: a pattern matches no layer, the blocks cannot be found, or the operands of a GEMM cannot be
                multiplied.
        """
        if any(not isinstance(rule.matcher, ModuleType) for rule in self.rules):
            check_names(model)
        return self.with_blocks_of(model, blocks)

    def with_blocks_of(self, model: nn.Module, blocks: str | None = None) -> GemmRecipe:
        """As `for_model`, for a model whose modules need not be named by their paths yet."""
        blocks = blocks if blocks is not None else self.blocks
        layers = layers_of(model)
        index = bind_all(self.rule_index, model, layers, blocks)
        rules = [Rule(matcher, rule.settings) for matcher, rule in zip(index.matchers, self.rules, strict=True)]
        recipe = self._with(rules=tuple(rules), blocks=blocks, checked_with_model=True, rule_index=index)
        for layer in layers:
            recipe.layer_formats(layer.name, layer.module_type)
        return recipe

    def explain(self, model: nn.Module | None = None, *, every_layer: bool = False) -> Explanation:
        """Explain which format each direction of each tensor has, and which setting decided it.

        Args:
            model: explain the layers of this model; without it, the default and each rule.
            every_layer: show every layer. By default layers with equal formats are shown together, with ``*`` for the
                numbers in their names.

        Returns:
            A table; print it.
        """
        from .explain import explain

        return explain(self, model, every_layer=every_layer)

    def rule_label(self, index: int) -> str:
        """The name of a rule in explanations and errors: ``rule 1 (*.lm_head)``."""
        return f"rule {index + 1} ({str(self.rules[index].matcher).partition(' (')[0]})"

    def _stages(self, indices: Iterable[int]) -> tuple[tuple[str, Settings], ...]:
        rules = [(self.rule_label(i), self.rules[i].settings) for i in indices]
        return (("default", _ATTENTION_NOT_SAID), *(self.settings_by or (("default", self.settings),)), *rules)

    def with_rules(self, rules: Iterable[Rule | str | tuple[str, Any]]) -> GemmRecipe:
        """A recipe with the same settings and options, and these rules."""
        return self.from_document(Document(None, dict(self.settings), self.set_options, [*map(_as_rule, rules)]))

    def with_settings_by(self, stages: Iterable[tuple[str, Settings]]) -> GemmRecipe:
        """An equal recipe that explains its settings: they are those of ``stages``, one on top of the other."""
        return self._with(settings_by=tuple(stages))

    def _with(self, **changes: Any) -> Self:
        new = object.__new__(type(self))
        vars(new).update({**self.__getstate__(), **changes})
        return new

    # ---- what follows from the value, found when it is first asked for -------------------------

    @cached_property
    def rule_index(self) -> RuleIndex:
        """Finds the rules for a layer."""
        return RuleIndex([rule.matcher for rule in self.rules])

    @cached_property
    def _known_formats(self) -> dict[tuple[str, str], LayerFormats]:
        """What `layer_formats` has found, by name and type: every tensor of a layer asks for it."""
        return {}

    @cached_property
    def _hash(self) -> int:
        return hash(self._value())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _FOUND_LATER}

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options().items() if name not in _FOUND_LATER}

    def _gemms_to_check(self) -> tuple[str, ...]:
        """The GEMMs whose operands must fit: those that do not decode them. A ``backward_override`` decodes."""
        if self.allow_mixed:
            return ()
        return ("fprop",) if self.backward_override else tuple(GEMMS)

    def _check_rules(self) -> None:
        """Raise if operands do not fit: in the default, or for a rule together with any of the rules before it."""
        gemms = self._gemms_to_check()
        default = _checked_formats(self._stages([]), gemms, "")
        wrong = unpaired_rule(default, (rule.settings for rule in self.rules), gemms)
        if wrong is not None:
            try:
                _checked_formats((*self._stages([]), ("rule", self.rules[wrong].settings)), gemms, "")
            except ValueError as error:
                raise ValueError(f"{self.rule_label(wrong)}: {error}") from None


@lru_cache(maxsize=256)
def _of_line(cls: Any, line: str) -> Any:
    """Parse a line once: autocast may get the same line in every step."""
    return cls.from_document(parse_line(line))


def _quantizes_attention(settings: Settings, tensors: Iterable[str]) -> bool:
    keys = ("attention", *(f"attention.{tensor}" for tensor in tensors))
    return any(key in keys and value != FormatSpec("hp") for key, value in settings)


@lru_cache(maxsize=4096)
def _checked_formats(stages: tuple[tuple[str, Settings], ...], gemms: tuple[str, ...], layer: str) -> LayerFormats:
    formats = make_layer_formats(stages)
    formats.check_pairs(layer, gemms)
    return formats


def _as_rule(rule: Rule | PhaseRule | str | tuple[str, Any]) -> Rule:
    if isinstance(rule, str):
        rule = parse_rule(rule)
    elif not isinstance(rule, Rule | PhaseRule):
        rule = make_rule(*rule)
    if isinstance(rule, PhaseRule):
        refuse_schedule(f"the phase '{rule.pattern}'")
    return rule


def _tensor_of(role: QuantizerRole | None) -> tuple[str | None, str, str]:
    """The tensor that a role means (None if it is not an operand of a GEMM), and the type and name of its module."""
    if role is None:
        return None, "", ""
    if role.module_type == "dpa":
        return (role.tensor_type if role.tensor_type in ATTENTION else None), "dpa", role.layer
    if role.tensor_type in TENSORS:
        return role.tensor_type, role.module_type, role.layer
    # Outputs of an attention core are recognised by the ending of their name.
    for end, tensor in _HINTS.items():
        if role.layer.endswith(end) and not role.module_type:
            return tensor, "dpa", role.layer.removesuffix(end).removesuffix(".")
    return None, role.module_type, role.layer
