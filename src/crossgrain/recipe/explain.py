"""A table that explains a recipe: the format of each direction of each tensor, and which setting decided it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..gemm.operands import GEMMS
from .base import BackwardOverride
from .binding import layers_of
from .layer_formats import ATTENTION, LayerFormats, make_layer_formats

if TYPE_CHECKING:
    from .gemm_recipe import GemmRecipe

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a path
_STAR = re.compile(r"(?<![^.])\*(?![^.])")
_COLUMNS = ("gemm", "tensor", "direction", "format", "made from", "decided by")
_WIDTHS = (9, 11, 10, 22, 11, 25)  # 98 columns with the gaps


@dataclass(frozen=True)
class ExplainRow:
    """One operand of one GEMM of one layer.

    Attributes:
        layer: name of the layer, or "default", or the label of a rule.
        role: the tensor: "input", "weight", "grad_output", or a tensor of attention.
        direction: "rowwise", "columnwise" or "both".
        gemm: "fprop", "dgrad", "wgrad" or "attention"; "all" in the row of the policy about NaNs and infinities.
        format: the format with its options.
        source: what the plane is made from: "original", "dequantized" or "dequantized_late".
        why: the setting that decided.
    """

    layer: str
    role: str
    direction: str
    gemm: str
    format: str
    source: str
    why: str

    def cells(self) -> tuple[str, ...]:
        """The cells of a table, without the layer."""
        return self.gemm, self.role, self.direction, self.format, self.source, self.why


@dataclass(frozen=True)
class Explanation:
    """What `GemmRecipe.explain` returns. Print it to see a table.

    Attributes:
        title: the recipe as text.
        rows: one row for every operand of every layer.
        every_layer: show every layer, also those with equal rows.

    Examples:
        >>> explanation = cg.GemmRecipe.load("mxfp8; head: hp").explain()
        >>> explanation.title
        'fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8; head: hp'
    """

    title: str
    rows: list[ExplainRow]
    every_layer: bool = False

    def sections(self) -> list[tuple[list[str], list[tuple[str, ...]]]]:
        """Lists of layers with equal rows, and those rows."""
        by_layer: dict[str, list[tuple[str, ...]]] = {}
        for row in self.rows:
            by_layer.setdefault(row.layer, []).append(row.cells())
        if self.every_layer:
            return [([layer], cells) for layer, cells in by_layer.items()]
        alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for layer, cells in by_layer.items():
            alike.setdefault(tuple(cells), []).append(layer)
        return [(collapsed(layers, by_layer), list(cells)) for cells, layers in alike.items()]

    def __str__(self) -> str:
        head = "  ".join(name.ljust(width) for name, width in zip(_COLUMNS, _WIDTHS, strict=True)).rstrip()
        lines = [*textwrap.wrap(self.title, 98, subsequent_indent="  "), "", head]
        for layers, cells in self.sections():
            lines += ["", *textwrap.wrap(", ".join(layers), 98, break_on_hyphens=False)]
            for row in _without_repeats(cells):
                lines += _wrapped(row)
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = [Text(self.title)]
        for layers, cells in self.sections():
            table = Table(*_COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False)
            for row in _without_repeats(cells):
                table.add_row(*map(Text, row))
            parts += [Text(", ".join(layers), style="bold"), table]
        return Group(*parts)


def explain(recipe: GemmRecipe, model: nn.Module | None = None, *, every_layer: bool = False) -> Explanation:
    """See `GemmRecipe.explain`."""
    rows: list[ExplainRow] = []
    if model is None:
        for label, chosen, attention in _cases(recipe):
            rows += _rows(label, chosen, [*GEMMS, *(["attention"] * attention)], recipe.backward_override)
    else:
        recipe = recipe.for_model(model)
        for layer in layers_of(model):
            chosen = recipe.layer_formats(layer.name, layer.module_type)
            places = ["attention"] if layer.module_type == "dpa" else list(GEMMS)
            rows += _rows(layer.name, chosen, places, recipe.backward_override)
    return Explanation(str(recipe), rows, every_layer)


def _cases(recipe: GemmRecipe) -> Iterator[tuple[str, LayerFormats, bool]]:
    """The default, and each rule on top of it; and whether it says something about attention."""
    stages = recipe._stages(range(len(recipe.rules)))
    default = recipe._stages([])
    yield "default", make_layer_formats(default), recipe.fp8_dpa
    for stage in stages[len(default) :]:
        yield stage[0], make_layer_formats((*default, stage)), any(key.startswith("attention") for key, _ in stage[1])


def _rows(layer: str, chosen: LayerFormats, places: Iterable[str], override: BackwardOverride) -> Iterator[ExplainRow]:
    if chosen.nonfinite is not None:
        policy = chosen.nonfinite
        yield ExplainRow(layer, "all", "", "all", f"nonfinite: {policy.value}", "", policy.why)
    for place in places:
        if place == "attention":
            for tensor in ATTENTION:
                choice = chosen.format(place, tensor)
                yield ExplainRow(layer, tensor, "both", place, str(choice.value), "original", choice.why)
            continue
        for tensor, direction in GEMMS[place].items():
            if override is not None and place != "fprop":  # what forward saved is multiplied in high precision
                kept = "dequantized" if override == "dequantized" and tensor != "grad_output" else "original"
                yield ExplainRow(layer, tensor, direction.value, place, "hp", kept, f"backward_override: {override}")
                continue
            choice, source = chosen.format(place, tensor), chosen.source(tensor)
            columnwise = direction.value == "columnwise"
            made_from = source.value if columnwise else "original"
            yield ExplainRow(layer, tensor, direction.value, place, str(choice.value), made_from, choice.why)


def collapsed(layers: Sequence[str], known: Iterable[str]) -> list[str]:
    """``["h.0.fc", "h.1.fc"]`` as ``["h.*.fc x2"]``, or as ``["h.0-1.fc x2"]`` if they are not all among ``known``."""
    numbers = _by_template(layers)
    totals: dict[str, int] = {}
    for layer in known:
        template = _NUMBER.sub("*", layer)
        totals[template] = totals.get(template, 0) + 1
    names = []
    for template, found in numbers.items():
        columns = [sorted(set(column)) for column in zip(*found, strict=True)]
        parts = ["*" if len(found) == totals[template] and len(found) > 1 else _ranges(column) for column in columns]
        filled = iter(parts)
        name = _STAR.sub(lambda _, filled=filled: next(filled), template)  # type: ignore[misc]
        names.append(f"{name} x{len(found)}" if len(found) > 1 else name)
    return names


def ranges(layers: Sequence[str]) -> list[str]:
    """``["h.0.fc", "h.1.fc"]`` as ``["h.0-1.fc"]``. Their number is added if the ranges do not show it."""
    names = []
    for template, found in _by_template(layers).items():
        columns = [sorted(set(column)) for column in zip(*found, strict=True)]
        filled = map(_ranges, columns)
        name = _STAR.sub(lambda _, filled=filled: next(filled), template)  # type: ignore[misc]
        names.append(name if len(found) == math.prod(map(len, columns)) else f"{name} ({len(found)} layers)")
    return names


def _by_template(layers: Iterable[str]) -> dict[str, list[list[int]]]:
    """The numbers in the names of layers, by the name with stars for the numbers."""
    numbers: dict[str, list[list[int]]] = {}
    for layer in layers:
        numbers.setdefault(_NUMBER.sub("*", layer), []).append([int(n) for n in _NUMBER.findall(layer)])
    return numbers


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2,5`` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _without_repeats(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    last = ""
    for row in rows:
        yield ("" if row[0] == last else row[0], *row[1:])
        last = row[0]


def _wrapped(cells: tuple[str, ...]) -> list[str]:
    """The lines of one row of the table."""
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _WIDTHS, strict=True)]
    height = max(map(len, wrapped))
    padded = [lines + [""] * (height - len(lines)) for lines in wrapped]
    return [
        "  ".join(lines[i].ljust(width) for lines, width in zip(padded, _WIDTHS, strict=True)).rstrip()
        for i in range(height)
    ]
