"""Find the first step in which something went wrong, and where: NaNs, saturation, or an unusually large error."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["nonfinite", "saturation", "error", "block_error"]
_HISTORY = 32  # looks that the usual value is the median of
_FEWEST = 3  # looks before something can be unusual
_SATURATION = 1e-3  # a smaller share is not worth a word
_MORE_SATURATION = 4.0
_MORE_ERROR = 2.0


@dataclass(frozen=True)
class BadStep:
    """The first trouble that was seen.

    Attributes:
        step: the step.
        looked_before: the step of the look before, in which all was well; None if it was the first look.
        layer: name of the layer.
        group: the group of a grouped layer; None without groups.
        tensor: "input", "weight" or "grad_output".
        direction: "rowwise" or "columnwise".
        kind: "nonfinite", "saturation", "error" or "block_error".
        value: number of NaNs and infinities, share of numbers that were cut off, relative error, or the relative error
            that 90 % of the blocks do not exceed.
        usual: the median of the looks before; None if there were too few.
    """

    step: int
    looked_before: int | None
    layer: str
    group: int | None
    tensor: str
    direction: str
    kind: Kind
    value: float
    usual: float | None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def __str__(self) -> str:
        group = "" if self.group is None else f" (group {self.group})"
        where = f"step {self.step}: {self.layer}{group}, {self.tensor} {self.direction}"
        what = {
            "nonfinite": f"{self.value:.0f} numbers are NaN or infinite",
            "saturation": f"{self.value:.2%} of the numbers were cut off{_usually(self.usual, '.2%')}",
            "error": f"relative error {self.value:.3f}{_usually(self.usual, '.3f')}",
            "block_error": f"relative error of the blocks {self.value:.3f} (90 %){_usually(self.usual, '.3f')}",
        }[self.kind]
        before = f"The look before was at step {self.looked_before}."
        return f"{where}: {what}. {'It was the first look.' if self.looked_before is None else before}"


def _usually(value: float | None, form: str) -> str:
    return "" if value is None else f", usually {value:{form}}"


class BadStepWatch:
    """Looks for the first bad step in records, in the order in which planes were made.

    A record is bad if its tensor or plane has NaNs or infinities; if more than 0.1 % of its numbers saturate, and four
    times as many as usual; or if its relative error, or that of most blocks, is twice the usual one. What is usual is
    the median of up to 32 looks before, and known after three. Saturation without a usual value is bad from 0.1 % on
    only where the scale was given from outside, as by delayed scaling; other formats have their usual share.

    Attributes:
        first: what was found; None if nothing was.
    """

    def __init__(self) -> None:
        self.first: BadStep | None = None
        self._history: dict[tuple[Any, ...], deque[float]] = {}
        self._last: int | None = None
        self._before: int | None = None

    def see(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Look at more records. Those of formats that are not in use do not count."""
        for record in records:
            if record.get("what_if") is None and self.first is None:
                self._see(record)

    def _see(self, record: Mapping[str, Any]) -> None:
        if record["step"] != self._last:
            self._before, self._last = self._last, record["step"]
        key = tuple(record[name] for name in ("layer", "group", "tensor", "direction"))
        values: dict[Kind, float | None] = {
            "saturation": record["saturation"],
            "error": record["relative_error"],
            "block_error": record["block_error"].get("90%"),
        }
        histories = {kind: self._history.setdefault((*key, kind), deque(maxlen=_HISTORY)) for kind in values}
        usual = {kind: _usual(history) for kind, history in histories.items()}
        found = _problem(record, values, usual)
        if found is not None:
            layer, group, tensor, direction = key
            self.first = BadStep(record["step"], self._before, layer, group, tensor, direction, *found)
            return
        for kind, value in values.items():
            if value is not None:
                histories[kind].append(value)


def _problem(
    record: Mapping[str, Any], values: Mapping[Kind, float | None], usual: Mapping[Kind, float | None]
) -> tuple[Kind, float, float | None] | None:
    nonfinite = record["nan"] + record["inf"]
    if nonfinite or record["nonfinite"]:
        return "nonfinite", float(nonfinite) or record["nonfinite"] * _numbers(record), None
    cut, usually_cut = record["saturation"], usual["saturation"]
    given = "given scale" in record["format"]
    if cut > _SATURATION and (given if usually_cut is None else cut > _MORE_SATURATION * usually_cut):
        return "saturation", cut, usually_cut
    errors: tuple[Kind, ...] = ("error", "block_error")
    for kind in errors:
        value, before = values[kind], usual[kind]
        if value and before and value > _MORE_ERROR * before:
            return kind, value, before
    return None


def _numbers(record: Mapping[str, Any]) -> int:
    return int(record["rows"] * record["shape"][1])


def _usual(values: deque[float]) -> float | None:
    return statistics.median(values) if len(values) >= _FEWEST else None


def first_bad_step(records: Iterable[Mapping[str, Any]]) -> BadStep | None:
    """The first bad step in records of planes, in the order in which they were written; None if all is well.

    Args:
        records: the records, such as `Inspection.records`.
    """
    watch = BadStepWatch()
    watch.see(records)
    return watch.first
