"""A plan as tables: for a terminal with rich, or as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .result import Plan

_TEXT_WIDTH = 80
_INDENT = "  "


@dataclass(frozen=True)
class Section:
    """A table: a title, names of columns, and rows. An indented row is a part of the row above."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def size(count: float) -> str:
    """A number of bytes in words: ``12.3 GB``, with units of 1000."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(count) < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{_three_digits(count)} {unit}"


def duration(seconds: float) -> str:
    """A duration in words: ``12.3 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def _flops(count: float) -> str:
    unit = "MFLOP"
    count /= 1e6
    for larger in ("GFLOP", "TFLOP", "PFLOP"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{_three_digits(count)} {unit}"


def title(plan: Plan) -> str:
    """The first line of a report."""
    setup = plan.setup
    cut = f", tensor parallel {setup.tensor_parallel}" if setup.tensor_parallel > 1 else ""
    shared = f", {setup.sharding}" if setup.replicas > 1 else ""
    return (
        f"{plan.model} ({_count(plan.parameters)} parameters) on {setup.gpus} x {setup.device.name}"
        f"{shared}{cut}, {plan.tokens_per_step:,} tokens per step"
    )


def _count(numbers: int) -> str:
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if numbers >= factor:
            return f"{numbers / factor:.3g}{unit}"
    return str(numbers)


def verdict(plan: Plan) -> str:
    """Whether the memory is enough, in words."""
    memory, room = plan.memory.total, plan.setup.device.memory * 1e9
    if plan.fits:
        return f"fits: {size(memory)} of {size(room)}, {size(room - memory)} left"
    return f"does not fit: {size(memory)} of {size(room)}, {size(memory - room)} too much"


def missing_rates(plan: Plan) -> str | None:
    """A line about formats without a published rate; None if there are none."""
    if not plan.without_rate:
        return None
    return f"no published rate for {', '.join(plan.without_rate)}: counted as bf16 (see the assumptions)"


def sections(plan: Plan) -> list[Section]:
    """The tables of a report."""
    return [_memory(plan), *([_wire(plan)] if plan.wire else []), _gemms(plan), _step(plan)]


def _memory(plan: Plan) -> Section:
    memory = plan.memory
    parts: list[tuple[str, int, dict[str, int]]] = [
        ("weights", sum(memory.weights.values()), memory.weights),
        ("gradients", memory.gradients, {}),
        ("optimizer", memory.optimizer, {"masters": memory.masters, "moments": memory.moments}),
        (
            "saved for backward",
            memory.activations,
            {
                "inputs of linear layers": memory.saved_inputs,
                "weights of linear layers": memory.saved_weights,
                "everything else": memory.saved_others,
            },
        ),
        ("workspace", sum(memory.workspace.values()), memory.workspace),
    ]
    rows: list[tuple[str, ...]] = []
    for name, total, within in parts:
        rows.append((name, size(total), ""))
        rows += [(f"{_INDENT}{part}", "", size(bytes)) for part, bytes in within.items() if bytes]
    return Section("memory of one GPU", ("", "bytes", "of which"), (*rows, ("total", size(memory.total), "")))


def _wire(plan: Plan) -> Section:
    rows = [(t.kind, size(t.bytes), duration(t.seconds)) for t in plan.wire]
    total = ("total", size(plan.wire_bytes), duration(plan.wire_seconds))
    return Section("received over the wire, per GPU and step", ("", "bytes", "time"), (*rows, total))


def _gemms(plan: Plan) -> Section:
    rows = [(w.gemm, w.format, w.kind, _flops(w.flops), duration(w.seconds)) for w in plan.work]
    total = ("total", "", "", _flops(sum(work.flops for work in plan.work)), duration(plan.gemm_seconds))
    return Section("GEMMs, per GPU and step", ("", "format", "rate of", "work", "time"), (*rows, total))


def _step(plan: Plan) -> Section:
    def rate(seconds: float) -> str:
        return f"{plan.tokens_per_step / seconds:,.0f}" if seconds else "-"

    rows = (
        ("GEMMs", duration(plan.gemm_seconds), ""),
        ("quantization", duration(plan.quantize_seconds), ""),
        *([("wire", duration(plan.wire_seconds), "")] if plan.wire else []),
        ("step, nothing overlaps", duration(plan.seconds_in_turn), rate(plan.seconds_in_turn)),
        ("step, the wire overlaps", duration(plan.seconds_together), rate(plan.seconds_together)),
    )
    return Section("time of a step", ("", "time", "tokens/s"), rows)


# ---- several plans ---------------------------------------------------------------------------------


def comparison(plans: dict[str, Plan]) -> Section:
    """A table with one row for each plan, by its label."""
    rows = tuple(
        (
            label,
            size(sum(plan.memory.weights.values())),
            size(plan.memory.activations),
            size(plan.memory.total) + ("" if plan.fits else "!"),
            size(plan.wire_bytes),
            duration(plan.compute_seconds),
            f"{duration(plan.seconds_together)}-{duration(plan.seconds_in_turn)}",
        )
        for label, plan in plans.items()
    )
    return Section("", ("recipe", "weights", "saved", "memory", "wire", "compute", "step"), rows)


COMPARISON_NOTE = (
    "All figures are for one GPU. saved: tensors saved for backward. memory: everything, with gradients, optimizer and "
    "workspace; ! means that it does not fit. wire: bytes received in a step. compute: GEMMs and quantization. step: "
    "if the wire overlaps completely with compute, and if it does not overlap."
)


# ---- plain text ------------------------------------------------------------------------------------


def as_text(plan: Plan) -> str:
    """A report as plain text."""
    lines = [*textwrap.wrap(title(plan), _TEXT_WIDTH), *textwrap.wrap(f"recipe: {plan.recipe}", _TEXT_WIDTH)]
    for section in sections(plan):
        lines += ["", section.title, *_aligned(section)]
    lines += ["", verdict(plan), *filter(None, [missing_rates(plan)]), "", "assumptions", *bullets(plan.assumptions)]
    return "\n".join(lines)


def _aligned(section: Section) -> list[str]:
    rows: Sequence[tuple[str, ...]] = (section.columns, *section.rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(section.columns))]
    words = text_columns(section)
    return [
        "  ".join(
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def text_columns(section: Section) -> set[int]:
    """The indices of columns of words. The other columns are numbers, which are aligned at the right."""
    return {i for i, name in enumerate(section.columns) if name in ("", "recipe", "format", "rate of")}


def bullets(sentences: Iterable[str], width: int = _TEXT_WIDTH) -> list[str]:
    """The lines of a list of sentences."""
    return [line for text in sentences for line in textwrap.wrap(f"- {text}", width, subsequent_indent="  ")]


# ---- rich ------------------------------------------------------------------------------------------


def as_table(section: Section) -> Any:
    """A section as a table of rich."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    words = text_columns(section)
    table = Table(
        title=section.title or None,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title_justify="left",
        title_style="bold",
    )
    for i, name in enumerate(section.columns):
        table.add_column(name, justify="left" if i in words else "right", no_wrap=True)
    for row in section.rows:
        if row[0] in ("total", "step, nothing overlaps"):
            table.add_section()
        style = "dim" if row[0].startswith(_INDENT) else ""
        table.add_row(*(Text(cell, style=style) for cell in row))
    return table
