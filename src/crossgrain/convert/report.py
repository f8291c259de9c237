"""`ConvertReport`: what `convert` did, which share of a model's products is quantized, and what is left and why."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..recipe import Recipe
from ..recipe.explain import ranges
from ..recipe.summary import HIGH_PRECISION
from .accounting import Product

# The share of the multiply-adds with weights that may be left in high precision without a warning.
UNASKED_LIMIT = 0.1


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` did. ``print`` it to read it; a notebook shows it as a table.

    Attributes:
        recipe: the recipe that the layers follow.
        converted: names of layers that became quantized layers; of experts and the like, one for each projection.
        bound: names of layers that were crossgrain's before and follow the recipe now.
        left: paths of layers and parameters that were not converted, with the reason.
        norms: paths of norms that became crossgrain's.
        formats: the formats of each layer, by name; "hp" if the recipe keeps it in high precision.
        products: multiply-adds by layer: of one token, or of the sample inputs.
        unasked: paths in ``left`` that nobody asked to leave.
        sampled: products were counted with sample inputs, not by shapes.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
        >>> report = cg.convert(model, "mxfp8", skip="1")
        >>> report.converted, report.left
        (['0'], {'1': "skip '1'"})
        >>> report.quantized_share
        0.5
    """

    recipe: Recipe
    converted: list[str] = field(default_factory=list)
    bound: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    norms: list[str] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    unasked: frozenset[str] = frozenset()
    sampled: bool = False

    # ---- shares --------------------------------------------------------------------------------

    @property
    def quantized_share(self) -> float:
        """The share of the multiply-adds with weights that is quantized, between 0 and 1."""
        return self._share(path for path, formats in self.formats.items() if formats != HIGH_PRECISION)

    @property
    def unasked_share(self) -> float:
        """The share of the multiply-adds with weights that is left in high precision without having been asked for."""
        return self._share(self.unasked)

    def share(self, path: str) -> float:
        """The share of one layer in the multiply-adds with weights."""
        return self._share([path])

    def _share(self, paths: Iterable[str]) -> float:
        counts = {product.path: product.multiply_adds for product in self.products if product.weight}
        whole = sum(counts.values())
        return sum(counts.get(path, 0) for path in paths) / whole if whole else 0.0

    @property
    def activation_share(self) -> float:
        """The share of products of two activations in all multiply-adds; 0 if these were counted by shapes."""
        whole = sum(product.multiply_adds for product in self.products)
        own = sum(product.multiply_adds for product in self.products if not product.weight)
        return own / whole if whole else 0.0

    # ---- text ----------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, str, str, float]]:
        """What happened, to how many layers, with which format or why, and their share; equal ones together."""
        groups: dict[tuple[str, str], list[str]] = {}
        for title, paths in (("converted", self.converted), ("bound", self.bound)):
            for path in paths:
                formats = self.formats.get(path, "")
                if formats == HIGH_PRECISION:
                    groups.setdefault(("left", "the recipe keeps it in high precision"), []).append(path)
                else:
                    groups.setdefault((title, formats), []).append(path)
        for path, reason in self.left.items():
            groups.setdefault(("left", reason), []).append(path)
        rows = [
            (f"{what} {_count(len(paths), 'layer')}", _names(paths), why, self._share(paths))
            for (what, why), paths in groups.items()
        ]
        if self.norms:
            count = _count(len(self.norms), "norm")
            rows.append((f"converted {count}", _names(self.norms), "computed in fp32", 0.0))
        return rows

    def table(self) -> list[tuple[str, str, str, str]]:
        """`rows` as text: what happened, layers, formats or reason, share of the multiply-adds."""
        return [(what, names, why, _percent(share) if share else "") for what, names, why, share in self.rows()]

    def summary(self) -> str:
        """One sentence: the share that is quantized, and what may be wrong about it."""
        how = "of the sample inputs" if self.sampled else "of a token, by shapes"
        text = f"{_percent(self.quantized_share)} of the multiply-adds with weights ({how}) are quantized"
        if self.sampled:
            return text + f"; products of two activations are another {_percent(self.activation_share)} of all"
        convolutions = sum(product.slides for product in self.products)
        if convolutions:
            text += (
                f"; this may be far off, because {_count(convolutions, 'convolution')} counted as if applied in one "
                "place only: convert(..., inputs=...) counts what runs"
            )
        return text

    def __str__(self) -> str:
        lines = [f"recipe: {self.recipe}", self.summary()]
        for what, names, why, share in self.rows():
            of_all = f" ({_percent(share)})" if share else ""
            formats = why in self.formats.values()
            lines.append(f"{what}{of_all} to {why}: {names}" if formats else f"{what}{of_all}: {names}: {why}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.table()
        )
        return (
            f"<p><b>{html.escape(self.summary())}</b><br>recipe: <code>{html.escape(str(self.recipe))}</code></p>"
            "<table><tr><th>what</th><th>layers</th><th>formats, or why</th><th>multiply-adds</th></tr>"
            f"{cells}</table>"
        )


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _names(paths: list[str]) -> str:
    return ", ".join(name or "the model itself" for name in ranges(paths))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share == 0 or share >= 0.001 else "less than 0.1 %"
