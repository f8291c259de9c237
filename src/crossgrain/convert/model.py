"""`convert`: make a model train in low precision with one line; `unconvert` undoes it.

    print(crossgrain.convert(model, "mxfp8"))

Every linear layer, and every module with projections that an adapter knows (fused experts, torch's attention, patch
convolutions), becomes one that is bound to the recipe. This happens in place: module objects, parameters, names, hooks
and state-dict keys stay the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..recipe import GemmRecipe, Recipe, as_recipe
from ..recipe.binding import layers_of
from ..recipe.summary import formats_in_short
from ..runtime.logs import inform, warn
from ..runtime.torch_patches.transformer_fast_path import close_fast_path, open_fast_path
from .accounting import Product, count_products, known_projections
from .choice import Choice, layer_names
from .defaults import KINDS, left_by_default
from .layers import Converted, ConvertedNorm, become_our_norm, become_plain, become_quantized, norm_class_for
from .model_step import forget_calls, step_with_calls
from .projections import ConvertedProjections, become_projections
from .report import UNASKED_LIMIT, ConvertReport
from .selection import Selection, follows_recipes, select
from .uncalled import watch


def convert(
    model: nn.Module,
    recipe: Recipe | str | os.PathLike[str],
    *,
    skip: Choice | Iterable[Choice] = (),
    include: Choice | Iterable[Choice] = (),
    norms: bool = False,
    inputs: Any = None,
    strict: bool = False,
) -> ConvertReport:
    """Make the products of a model compute in the formats of a recipe, in place.

    Layers are named by their paths. A model that was converted before follows the new recipe, and layers that are
    skipped now become plain again. If this raises, nothing has changed.

    Output heads, adapters of peft and routers of experts stay in high precision, unless ``include`` or a rule of the
    recipe names them.

    Args:
        model: the model to change.
        recipe: a recipe, the name of a preset, a one-line recipe or a file. It is bound to the layers, so no autocast
            is needed. An autocast that is active overrides it; ``autocast(enabled=False)`` computes in high precision.
        skip: layers not to convert: patterns as in recipes (``"lm_head"``, ``"first 2 blocks"``), types (of the layer
            or of a module it is in), or functions of path and module that return True.
        include: layers to convert that stay in high precision by default; given as in ``skip``.
        norms: convert ``nn.LayerNorm`` and ``nn.RMSNorm`` too; crossgrain's compute in fp32 internally. Norms without
            weight, bias or eps are not converted.
        inputs: sample arguments of the model: a tensor, a tuple or a mapping of keyword arguments. The model runs with
            them once, before it is converted, to count all products exactly. Without them they are counted by shapes.
        strict: raise instead of warning if more than a tenth of the multiply-adds with weights would be left in high
            precision without having been asked for.

    Returns:
        What was converted, and what was not and why.

    Raises:
        ValueError: the model has no layer to convert, a pattern matches nothing, the recipe does not fit the model, or
            too much is left with ``strict``.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> print(cg.convert(model, "mxfp8; 1: hp"))
        recipe: fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8; 1: hp
        50 % of the multiply-adds with weights (of a token, by shapes) are quantized
        converted 1 layer (50 %) to mxfp8: 0
        left 1 layer (50 %): 1: the recipe keeps it in high precision
    """
    recipe = as_recipe(recipe)
    products = count_products(model, inputs)
    others = [product.path for product in products if product.weight and not product.layer]
    readers = {product.path: product.read_by for product in products if product.layer and product.read_by}
    selection = select(model, recipe, skip, include, others, readers)
    if selection.unasked >= selection.modules.keys():
        raise ValueError(_nothing_to_convert(model, selection))
    with _named_by_paths(selection):
        bound_recipe = recipe.for_model(model) if isinstance(recipe, GemmRecipe) else recipe
        report = _report(model, bound_recipe, selection, products, sampled=inputs is not None)
        _look_at_what_is_left(report, model, strict)

    for path in selection.left:
        if isinstance(selection.modules[path], Converted | ConvertedProjections):
            become_plain(selection.modules[path])
    new: list[Any] = []
    for path in selection.chosen:
        layer: Any = selection.modules[path]
        if not follows_recipes(layer):
            if known_projections(layer):
                become_projections(layer)
            else:
                become_quantized(layer)
                new.append(layer)
            layer.name = path or None
        layer.bound_recipe = bound_recipe
    watch(model, new)
    converted_norms, left_norms = _convert_norms(model, norms)
    report.norms.extend(converted_norms)
    report.left.update(left_norms)
    forget_calls(model)
    if bound_recipe.may_keep_histories():
        step_with_calls(model)
    for module in model.modules():
        if any(map(follows_recipes, module.modules())):
            close_fast_path(module)
    inform(__name__, report)
    return report


def unconvert(model: nn.Module) -> list[str]:
    """Undo `convert`: layers and norms become what they were.

    Layers that were created as crossgrain's stay, but are no longer bound to a recipe.

    Args:
        model: the model to change.

    Returns:
        The paths of the layers and norms that were changed back.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> cg.unconvert(model)
        ['0']
        >>> type(model[0])
        <class 'torch.nn.modules.linear.Linear'>
    """
    changed = []
    for path, module in model.named_modules():
        open_fast_path(module)
        forget_calls(module)
        if isinstance(module, Converted | ConvertedNorm | ConvertedProjections):
            become_plain(module)
            changed.append(path)
        elif follows_recipes(module):
            module.bound_recipe = None
    return changed


@contextmanager
def _named_by_paths(selection: Selection) -> Iterator[None]:
    """Name the layers by their paths. If the conversion is refused inside, the names are restored."""
    named: list[tuple[Any, str | None]] = []
    for path, layer in selection.modules.items():
        own: Any = layer
        ours = isinstance(layer, Converted | ConvertedProjections)
        if ours or (follows_recipes(layer) and own.name is None):
            named.append((layer, own.name))
            own.name = path or None
    try:
        yield
    except BaseException:
        for layer, name in named:
            layer.name = name
        raise


# ---- what is left ----------------------------------------------------------------------------------------


def _nothing_to_convert(model: nn.Module, selection: Selection) -> str:
    text = f"this {type(model).__name__} has no linear layer to convert"
    reasons = list(dict.fromkeys(f"{path}: {reason}" for path, reason in selection.left.items()))
    return f"{text}: {'; '.join(reasons[:3])}{'; ...' * (len(reasons) > 3)}" if reasons else text


def _report(
    model: nn.Module, recipe: Recipe, selection: Selection, products: list[Product], sampled: bool
) -> ConvertReport:
    report = ConvertReport(recipe, products=products, sampled=sampled, unasked=frozenset())
    unasked: set[str] = set()
    kinds = {layer.name: layer.module_type for layer in layers_of(model)}
    for path, module in selection.modules.items():
        names = layer_names(path, module)
        if path in selection.left:
            report.left.update(dict.fromkeys(names, selection.left[path]))
            unasked |= set(names) if path in selection.unasked else set()
            continue
        if len(names) == 1 and follows_recipes(module) and not isinstance(module, ConvertedProjections):
            inner = [name for name in kinds if name == path or name.startswith(f"{path}.")]
            formats = {formats_in_short(recipe, name, kinds.get(name, "linear")) for name in inner or [path]}
            report.formats[path] = "; ".join(sorted(formats))
        else:
            report.formats.update({name: formats_in_short(recipe, name, kinds.get(name, "linear")) for name in names})
        (report.bound if follows_recipes(module) else report.converted).extend(names)
    by_default = left_by_default(model)
    for product in products:
        if product.weight and not product.layer and product.multiply_adds:
            path, kind = product.path, by_default.get(product.path.rpartition(".")[0])
            report.left[path] = selection.skipped.get(path) or _why_not_a_layer(product, kind)
            unasked |= {path} if kind is None and path not in selection.skipped else set()
    return ConvertReport(**{**vars(report), "unasked": frozenset(unasked)})


def _why_not_a_layer(product: Product, kind: str | None) -> str:
    owner = product.owner
    if kind is not None:
        return (
            f"by default, {KINDS[kind]} stay in high precision; {owner} is no linear layer, so "
            f"crossgrain.register_layer({owner}, adapter) and include convert it"
        )
    return (
        f"a parameter that {owner} uses itself, not by a linear layer; if it multiplies its input by it, "
        f"crossgrain.register_layer({owner}, adapter) converts it"
    )


def _look_at_what_is_left(report: ConvertReport, model: nn.Module, strict: bool) -> None:
    share = report.unasked_share
    if share <= UNASKED_LIMIT:
        return
    worst = sorted(report.unasked, key=report.share, reverse=True)
    text = (
        f"convert: {100 * share:.0f} % of the multiply-adds with weights of this {type(model).__name__} stay in high "
        f"precision, for example {worst[0]}: {report.left[worst[0]]}. The report lists all of them; skip='{worst[0]}' "
        "says that this is intended"
    )
    if strict:
        raise ValueError(text)
    warn(__name__, text)


def _convert_norms(model: nn.Module, wanted: bool) -> tuple[list[str], dict[str, str]]:
    """Convert norms; without ``wanted``, converted norms become plain again. Return their paths, and those left."""
    changed: list[str] = []
    left: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, ConvertedNorm) and not wanted:
            become_plain(module)
        elif wanted and (isinstance(module, ConvertedNorm) or norm_class_for(module) is not None):
            if not isinstance(module, ConvertedNorm):
                become_our_norm(module)
            changed.append(path)
        elif wanted and _looks_like_a_norm(module):
            kind = type(module).__name__
            left[path] = f"norms=True is for nn.LayerNorm and nn.RMSNorm with weight and eps, not for {kind}"
    return changed, left


def _looks_like_a_norm(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "norm" in name and not any(True for _ in module.children())
