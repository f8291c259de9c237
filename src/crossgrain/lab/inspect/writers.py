"""Where an Inspector writes: a file of JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

Lines = Sequence[Mapping[str, Any]]

# What is drawn as a curve. The rest is the same in every step, or is a part of a histogram.
SCALARS = (
    "relative_error",
    "snr_db",
    "bias",
    "noise",
    "shrinkage",
    "underflow",
    "saturation",
    "nonfinite",
    "zero_scales",
    "scale_log2_min",
    "scale_log2_max",
    "rotation_gain_db",
    "amax",
    "rms",
    "kurtosis",
    "nan",
    "inf",
)


class Writer(Protocol):
    """What an Inspector writes its records to. Any object with these methods will do."""

    def begin(self, header: Mapping[str, Any]) -> None:
        """Called once, before the first records: what is looked at, and which layers are not seen."""

    def write(self, step: int, records: Lines, summary: Mapping[str, Any]) -> None:
        """Called after each look with one record for each plane, and a summary of the look."""

    def end(self, footer: Mapping[str, Any]) -> None:
        """Called at the end. A header may not have been written, if there was no look."""


class JsonlWriter:
    """Appends JSON lines to a file: a header, one line for each plane, one for each look, and a line at the end.

    Several runs may be in one file; each begins with a header. With several ranks, each writes a file of its own:
    ``stats.jsonl`` becomes ``stats.rank0.jsonl``.

    Args:
        path: the file.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with tempfile.TemporaryDirectory() as root:
        ...     with cg.lab.Inspector(model, cg.lab.JsonlWriter(f"{root}/stats.jsonl"), every=1) as inspector:
        ...         model(torch.randn(32, 32)).sum().backward()
        ...         inspector.step()
        ...     len(cg.lab.read_inspection(f"{root}/stats.jsonl").looks)
        1
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = own_path(Path(path))
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def begin(self, header: Mapping[str, Any]) -> None:
        self._append([header])

    def write(self, step: int, records: Lines, summary: Mapping[str, Any]) -> None:
        self._append([*records, summary])

    def end(self, footer: Mapping[str, Any]) -> None:
        self._append([footer])

    def _append(self, lines: Lines) -> None:
        """Append lines in one write, so that a run that is killed leaves no half line but perhaps the last."""
        text = "".join(json.dumps(finite(line), separators=(",", ":")) + "\n" for line in lines)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


class TensorBoardWriter:
    """Writes curves, and histograms of scales, for TensorBoard. Needs tensorboard.

    Tags are like ``blocks.0.fc1/input/rowwise/snr_db``; those of formats that are not in use begin with ``what if``.

    Args:
        to: the directory, or a `SummaryWriter`, which is then not closed.

    Raises:
        ImportError: tensorboard is not installed.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with tempfile.TemporaryDirectory() as root:
        ...     with cg.lab.Inspector(model, cg.lab.TensorBoardWriter(root), every=1) as inspector:
        ...         model(torch.randn(32, 32)).sum().backward()
        ...         inspector.step()
    """

    def __init__(self, to: str | os.PathLike[str] | Any) -> None:
        self._own = isinstance(to, str | os.PathLike)
        self._board: Any = _summary_writer(to) if self._own else to

    def begin(self, header: Mapping[str, Any]) -> None:
        self._board.add_text("crossgrain inspect", f"```\n{json.dumps(finite(header), indent=1)}\n```")

    def write(self, step: int, records: Lines, summary: Mapping[str, Any]) -> None:
        for record in records:
            tag = tag_of(record)
            for name, value in scalars_of(record):
                self._board.add_scalar(f"{tag}/{name}", value, step)
            histogram = record["scale_histogram"]
            if histogram:
                self._board.add_histogram_raw(f"{tag}/log2 of scales", global_step=step, **_raw(histogram))
        self._board.flush()

    def end(self, footer: Mapping[str, Any]) -> None:
        self._board.add_text("crossgrain inspect/end", f"```\n{json.dumps(finite(footer), indent=1)}\n```")
        self._board.flush()
        if self._own:
            self._board.close()


class WandbWriter:
    """Logs curves, and histograms of scales, to Weights & Biases.

    Args:
        run: a run that ``wandb.init`` has returned; None for the current one.
        log_steps: pass the number of the step to ``log``. Switch it off if the training program logs with a counter of
            its own, because steps that go backwards are dropped; the number is then logged as ``crossgrain/step``.

    Raises:
        ImportError: wandb is not installed.
        RuntimeError: there is no run.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with cg.lab.Inspector(model, cg.lab.WandbWriter(wandb.init()), every=1) as inspector:  # doctest: +SKIP
        ...     model(torch.randn(32, 32)).sum().backward()
        ...     inspector.step()
    """

    def __init__(self, run: Any = None, *, log_steps: bool = True) -> None:
        self._wandb = _wandb()
        self._run = self._wandb.run if run is None else run
        self._log_steps = log_steps
        if self._run is None:
            raise RuntimeError("WandbWriter needs a run: call wandb.init before, or pass what it returns")

    def begin(self, header: Mapping[str, Any]) -> None:
        self._run.config.update({"crossgrain_inspect": finite(header)}, allow_val_change=True)

    def write(self, step: int, records: Lines, summary: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {"crossgrain/step": step}
        for record in records:
            tag = tag_of(record)
            values.update({f"{tag}/{name}": value for name, value in scalars_of(record)})
            histogram = {int(exponent): count for exponent, count in record["scale_histogram"].items()}
            if histogram:
                lowest, highest = min(histogram), max(histogram)
                counts = [histogram.get(exponent, 0) for exponent in range(lowest, highest + 1)]
                edges = [float(edge) for edge in range(lowest, highest + 2)]
                values[f"{tag}/log2 of scales"] = self._wandb.Histogram(np_histogram=(counts, edges))
        self._run.log(values, **({"step": step} if self._log_steps else {}))

    def end(self, footer: Mapping[str, Any]) -> None:
        self._run.summary.update({"crossgrain_inspect": finite(footer)})


def tag_of(record: Mapping[str, Any]) -> str:
    """The place of a record: ``blocks.0.fc1/input/rowwise``."""
    group = "" if record["group"] is None else f"[{record['group']}]"
    place = f"{record['layer']}{group}/{record['tensor']}/{record['direction']}"
    return place if record["what_if"] is None else f"what if {record['what_if']}/{place}"


def scalars_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record that are drawn as curves, and the quantiles of the error over blocks."""
    for name in SCALARS:
        value = record.get(name)
        if value is not None:
            yield name, float(value)
    for name, value in record["block_error"].items():
        yield f"block_error {name}", float(value)


def finite(value: Any) -> Any:
    """Plain data for JSON, which has no NaN and no infinity: None stands for them."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def own_path(path: Path) -> Path:
    """The file of this rank."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return path.with_suffix(f".rank{dist.get_rank()}{path.suffix}")
    return path


def _raw(histogram: Mapping[Any, int]) -> dict[str, Any]:
    """A histogram of whole numbers as TensorBoard stores it."""
    counts = {int(exponent): count for exponent, count in sorted(histogram.items(), key=lambda item: int(item[0]))}
    exponents = list(range(min(counts), max(counts) + 1))
    return {
        "min": float(exponents[0]),
        "max": float(exponents[-1]),
        "num": sum(counts.values()),
        "sum": float(sum(e * n for e, n in counts.items())),
        "sum_squares": float(sum(e * e * n for e, n in counts.items())),
        "bucket_limits": [exponent + 0.5 for exponent in exponents],
        "bucket_counts": [counts.get(exponent, 0) for exponent in exponents],
    }


def _summary_writer(directory: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoardWriter needs tensorboard: pip install 'crossgrain[tensorboard]'") from error
    return SummaryWriter(str(own_path(Path(directory))))


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError("WandbWriter needs wandb: pip install 'crossgrain[wandb]'") from error
    return wandb
