"""`recipe_of_sites`: a recipe in which chosen GEMMs of chosen layers have other formats, in a short text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..gemm.operands import GEMMS
from .binding import Layer
from .cover import literal, patterns_for
from .format_spec import FormatSpec
from .gemm_recipe import GemmRecipe
from .layer_formats import LayerFormats, Settings, gemms_of, make_settings, operands_of
from .rules import Glob, Rule

_Wanted = dict[tuple[str, FormatSpec], dict[str, None]]  # the layers to change, in their order, by GEMM and format


def recipe_of_sites(
    base: GemmRecipe, formats: Mapping[tuple[str, str], str | FormatSpec], layers: Sequence[Layer]
) -> GemmRecipe:
    """The base with other formats for some GEMMs of some layers, by as few and as short rules as are found.

    Exactly these GEMMs get these formats, and everything else about all ``layers`` stays as it is in the base. The
    result is checked for this, layer by layer. The rules of the base come last, so they win over the new ones: a GEMM
    that one of them decides cannot get another format. New patterns may also match layers that are not in ``layers``,
    so list all layers of the model.

    >>> layers = [Layer(f"layers.{i}.{part}") for i in range(24) for part in ("qkv", "proj", "fc1", "fc2")]
    >>> chosen = {(f"layers.{i}.fc2", "dgrad"): "nvfp4" for i in range(24)}
    >>> str(recipe_of_sites(GemmRecipe.load("mxfp8"), chosen, layers))
    'fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8; *.fc2: dgrad: nvfp4'

    Args:
        base: the recipe; rules for blocks must have paths (`GemmRecipe.for_model`).
        formats: by name of the layer and GEMM, a format as in a recipe: ``{("lm_head", "fprop"): "mxfp8"}``.
        layers: all layers of the model, as `crossgrain.recipe.binding.layers_of` lists them.

    Returns:
        The recipe. Its text gives it back: ``GemmRecipe.load(str(recipe)) == recipe``.

    Raises:
        KeyError: a layer is not in ``layers``, or a GEMM does not exist.
        ValueError: a rule of the base decides a GEMM that is to get another format; or a format cannot be used there.
    """
    wanted = _changes(base, formats, layers)
    expected = {layer: _expected(base, wanted, layer) for layer in layers}
    wrong: list[str] = []
    for rules in (_short_rules(base, wanted, layers), _explicit_rules(wanted)):
        recipe = base.with_rules([*rules, *base.rules])
        unnamed = {name for names in wanted.values() for name in names if not recipe.names_layer(name)}
        wrong = [each.name for each in layers if each.name in unnamed or _formats(recipe, each) != expected[each]]
        if not wrong and GemmRecipe.load(str(recipe)) == recipe:
            return recipe
    what = f"{wrong[0]!r} its format alone" if wrong else "these layers their formats"
    raise ValueError(f"no rules were found that give {what}: names of layers cannot be told apart by patterns")


def deciding_rule(recipe: GemmRecipe, layer: Layer, gemm: str) -> str | None:
    """The last rule that sets an operand of a GEMM of a layer, as errors name it; None if no rule does."""
    keys = ("all", gemm, *(f"{gemm}.{tensor}" for tensor in GEMMS[gemm]))
    for index in reversed(recipe.rule_index.rules(layer.name, layer.module_type)):
        if any(key in keys for key, _ in recipe.rules[index].settings):
            return recipe.rule_label(index)
    return None


# ---- what is wanted --------------------------------------------------------------------------------


def _changes(base: GemmRecipe, formats: Mapping[tuple[str, str], str | FormatSpec], layers: Sequence[Layer]) -> _Wanted:
    """The layers whose format changes, by GEMM and format, in the order of the model."""
    known = {layer.name: layer for layer in layers if layer.module_type != "dpa"}
    for name, gemm in formats:
        if name not in known or gemm not in GEMMS:
            what = f"layer {name!r} in the list of layers" if name not in known else f"GEMM {gemm!r}"
            raise KeyError(f"there is no {what}")
    specs = {text: FormatSpec.parse(text) for text in set(formats.values())}
    for gemm, text in {(gemm, text) for (_, gemm), text in formats.items()}:
        make_settings({gemm: specs[text]})  # raises if the format cannot be used for this GEMM
    found: _Wanted = {}
    for layer in known.values():
        for gemm in GEMMS:
            if (layer.name, gemm) not in formats:
                continue
            spec = specs[formats[layer.name, gemm]]
            present = base.layer_formats(layer.name, layer.module_type)
            if all(present.format(gemm, tensor).value == own for tensor, own in operands_of(spec, gemm).items()):
                continue
            rule = deciding_rule(base, layer, gemm)
            if rule is not None:
                raise ValueError(f"{gemm} of {layer.name!r} cannot be {spec}: {rule} of the base decides it")
            found.setdefault((gemm, spec), {})[layer.name] = None
    return found


def _expected(base: GemmRecipe, wanted: _Wanted, layer: Layer) -> dict[Any, Any]:
    expected = _formats(base, layer)
    for (gemm, spec), names in wanted.items():
        if layer.name in names and layer.module_type != "dpa":
            expected.update({(gemm, tensor): own for tensor, own in operands_of(spec, gemm).items()})
    return expected


def _formats(recipe: GemmRecipe, layer: Layer) -> dict[Any, Any]:
    """Everything that a recipe says about a layer, without who says it."""
    chosen: LayerFormats = recipe.layer_formats(layer.name, layer.module_type)
    read = ("attention",) if layer.module_type == "dpa" else (*GEMMS, "attention")
    return {
        **{(place, tensor): own.value for (place, tensor), own in chosen.formats if place in read},
        **{tensor: own.value for tensor, own in chosen.sources},
        "nonfinite": None if chosen.nonfinite is None else chosen.nonfinite.value,
    }


# ---- rules -----------------------------------------------------------------------------------------


def _explicit_rules(wanted: _Wanted) -> list[Rule]:
    """Rules that list every layer."""
    return [
        Rule(Glob(tuple(map(literal, names))), make_settings({gemm: spec})) for (gemm, spec), names in wanted.items()
    ]


def _short_rules(base: GemmRecipe, wanted: _Wanted, layers: Sequence[Layer]) -> list[Rule]:
    """A rule for each set of layers; two if a rule for more layers, and one that takes it back, are shorter.

    A rule sets no GEMM of a layer that another one changes, so only those that take back must be the last.
    """
    by_names: dict[tuple[str, ...], dict[str, FormatSpec]] = {}
    for (gemm, spec), names in wanted.items():
        by_names.setdefault(tuple(names), {})[gemm] = spec
    changing: dict[Glob, dict[str, FormatSpec]] = {}
    restoring: dict[Glob, dict[str, FormatSpec | str]] = {}
    named = {layer.name for layer in layers if base.names_layer(layer.name)}
    for changed, specs in sorted(by_names.items(), key=lambda item: -len(item[0])):
        elsewhere = {name for (gemm, _), own in wanted.items() if gemm in specs for name in own}.difference(changed)
        unchanged = [
            layer.name
            for layer in layers
            if layer.name not in changed
            and layer.name not in elsewhere
            and layer.module_type != "dpa"  # has no GEMMs with weights
            and not all(_is_decided(base, layer, gemm) for gemm in specs)  # otherwise a later rule sets it anyway
        ]
        naming = not named.issuperset(changed)  # another rule names them already
        named.update(changed)
        glob, back = _glob(changed, [*unchanged, *elsewhere], naming), None
        more = _of_mostly_changed_kinds(changed, unchanged)
        if more:
            before = {key: value for key, value in base.settings if key.partition(".")[0] in specs}
            rest = [name for name in unchanged if name not in more]
            broad = _glob([*changed, *more], [*rest, *elsewhere], naming)
            taken_back = _glob(list(more), [*changed, *elsewhere], naming=False)
            if _length(broad, specs) + _length(taken_back, before) < _length(glob, specs):
                glob, back = broad, taken_back
        changing.setdefault(glob, {}).update(specs)
        if back is not None:
            restoring.setdefault(back, {}).update(before)
    return [Rule(glob, _settings(base, specs)) for glob, specs in changing.items()] + [
        Rule(glob, make_settings(values)) for glob, values in restoring.items()
    ]


def _glob(names: Sequence[str], others: Sequence[str], naming: bool) -> Glob:
    return Glob(tuple(patterns_for(names, others, naming=naming)))


def _of_mostly_changed_kinds(changed: Sequence[str], unchanged: Sequence[str]) -> dict[str, None]:
    """The unchanged layers of each kind of which at least half changes."""
    changes, stays = Counter(map(_kind, changed)), Counter(map(_kind, unchanged))
    return {name: None for name in unchanged if changes[_kind(name)] >= stays[_kind(name)]}


def _length(glob: Glob, settings: Mapping[str, object]) -> int:
    return len(f"; {glob}: " + ", ".join(f"{key}: {value}" for key, value in settings.items()))


def _kind(name: str) -> str:
    """The name without its numbers: layers that differ only in them are of one kind."""
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def _is_decided(base: GemmRecipe, layer: Layer, gemm: str) -> bool:
    """Whether rules of the base set both operands of a GEMM."""
    keys = {key for i in base.rule_index.rules(layer.name, layer.module_type) for key, _ in base.rules[i].settings}
    return "all" in keys or gemm in keys or keys >= {f"{gemm}.{tensor}" for tensor in GEMMS[gemm]}


def _settings(base: GemmRecipe, specs: Mapping[str, FormatSpec]) -> Settings:
    """The settings of a rule: a format for all GEMMs, if there is one that means the same."""
    if len(specs) == len(GEMMS) and not any(key.endswith(".source") for key, _ in base.settings):
        fields = {name: getattr(spec, name) for spec in specs.values() for name in spec.set_fields()}
        first = next(iter(specs.values()))
        try:
            one = replace(first, **fields)
        except ValueError:
            one = first
        if dict(gemms_of(one)) == dict(specs):
            return make_settings({"all": one})
    return make_settings(specs)
