"""`Inspector`: statistics of everything that a model quantizes, every few steps of a running training program.

    with crossgrain.lab.Inspector(model, "stats.jsonl", every=200, what_if=["nvfp4", "mxfp8"]) as look:
        for batch in data:
            loss = model(batch)
            ...
            optimizer.step()
            look.step()
    print(look.report())

Between the looks nothing is observed at all. A look changes no bit of the training.
"""

from __future__ import annotations

import fnmatch
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from ...planes import Direction
from ...quantizers.observer import PlanesMade, observe
from ...runtime.logs import warn
from ...runtime.version import PACKAGE_VERSION
from .bad_step import BadStep, BadStepWatch
from .layers import LayerNames, NotSeen, not_quantized, not_seen, quantized_modules
from .looking import Look, Record, Settings
from .report import VERSION, Inspection
from .what_if import WhatIf
from .writers import JsonlWriter, Writer

Where = str | os.PathLike[str] | Writer | Sequence[str | os.PathLike[str] | Writer] | None
_Key = tuple[str, int | None, str, str, str | None]  # layer, group, tensor, direction, what if


class Inspector:
    """Looks at every tensor that the layers of a model quantize, in each direction, every few steps.

    It is a context manager, or use `open` and `close`. Call `step` at the end of each step.

    Of the calls of a layer in one step, as in gradient accumulation, the first is looked at. Forward passes without
    gradients (validation) and recomputations of what was seen already are not. docs/how-to/inspect.md has all of it.

    Args:
        model: the model: converted, or of crossgrain's modules or operations.
        to: where to write: a file of JSON lines, a `Writer`, or several of both; None to keep the last look only.
        every: look at steps 0, ``every``, 2 · ``every``, ...
        what_if: formats or recipes that are not in use, to look at as well: see `WhatIf`.
        rows: look at so many rows of a tensor, evenly spread pieces of whole blocks; None for all. Amax, NaNs and
            infinities are those of the whole tensor anyway.
        draws: how often stochastic rounding is repeated, to tell bias from noise; 0 not to.
        layers: patterns of the names of layers to look at, such as "*.mlp.*"; None for all.
        first_step: number of the first step, for runs that are resumed.

    Attributes:
        step_number: the number of the step that is running.

    Raises:
        ValueError: an argument is wrong.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with cg.lab.Inspector(model, every=1) as inspector:
        ...     model(torch.randn(32, 32)).sum().backward()
        ...     inspector.step()
        >>> sorted({record["tensor"] for record in inspector.report().records})
        ['grad_output', 'input', 'weight']
    """

    def __init__(
        self,
        model: nn.Module,
        to: Where = None,
        *,
        every: int = 200,
        what_if: Iterable[str] = (),
        rows: int | None = 128,
        draws: int = 4,
        layers: str | Iterable[str] | None = None,
        first_step: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if rows is not None and rows < 1:
            raise ValueError(f"rows must be at least 1, or None for all rows; got {rows}")
        if draws < 0 or draws == 1:
            raise ValueError(f"draws must be 0, or at least 2 to have a variance; got {draws}")
        self._model = model
        self._every = every
        self._settings = Settings([WhatIf(text) for text in _texts(what_if)], rows, draws)
        self._patterns = None if layers is None else tuple(_texts(layers))
        self._writers = [JsonlWriter(to) if isinstance(to, str | os.PathLike) else to for to in _several(to)]
        self.step_number = first_step
        self._names = LayerNames(model)
        self._lock = threading.Lock()
        self._watching: AbstractContextManager[None] | None = None
        self._watch = BadStepWatch()
        self._seen: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self._latest = Inspection()
        self._warned: dict[str, str] | None = None
        self._closed = False
        self._begin_look()

    # ---- steps ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def open(self) -> None:
        """Begin the first step.

        Raises:
            RuntimeError: the Inspector was closed.
        """
        if self._closed:
            raise RuntimeError("this Inspector was closed: make a new one, with first_step if the run goes on")
        if self._watching is None and self.step_number % self._every == 0:
            self._begin_look()
            self._watching = observe(self._look, "crossgrain.lab.Inspector")
            self._watching.__enter__()

    def step(self) -> None:
        """End a step, and begin the next. Call it after the optimizer's step.

        Raises:
            ObserverError: a look failed. It is a bug; training itself is not affected.
        """
        self._end_look()
        self.step_number += 1
        self.open()

    def close(self, failed: bool = False) -> None:
        """End the last step, and write the end of the file. Closing it again does nothing.

        Args:
            failed: the step ended with an error. What was seen of it is written.
        """
        if self._closed:
            return
        try:
            self._end_look(failed, closing=True)
        finally:
            self._closed = True
            if self._latest.header:
                self._latest.end = footer = self._footer()
                for writer in self._writers:
                    writer.end(footer)

    @property
    def is_looking(self) -> bool:
        """Whether the running step is looked at."""
        return self._watching is not None

    # ---- what was seen -------------------------------------------------------------------------

    def report(self) -> Inspection:
        """The last look, the layers that were not seen and why, and the first bad step of all looks. It prints well."""
        return self._latest

    def first_bad_step(self) -> BadStep | None:
        """The first look with NaNs, unusual saturation or an unusual error, and where; None if there was none."""
        return self._watch.first

    # ---- one look ------------------------------------------------------------------------------

    def _begin_look(self) -> None:
        self._found: dict[_Key, Record] = {}
        self._calls: Counter[tuple[str, int | None, str, str]] = Counter()
        self._left_out: Counter[str] = Counter()
        self._seconds = 0.0

    def _look(self, event: PlanesMade) -> None:
        """Called by whatever makes planes, in any thread."""
        start = time.thread_time()
        with self._lock:
            name = self._names.name(event.subject) if event.subject else None
            if name is None:
                self._left_out["planes of no layer of the model"] += 1
            elif not event.training:
                self._left_out["planes of passes without gradients"] += 1
            elif not event.complete:
                self._left_out["planes of which other ranks write a part"] += 1
            elif self._is_chosen(name):
                self._look_at(event, name)
            self._seconds += time.thread_time() - start

    def _is_chosen(self, layer: str) -> bool:
        return self._patterns is None or any(fnmatch.fnmatchcase(layer, pattern) for pattern in self._patterns)

    def _look_at(self, event: PlanesMade, name: str) -> None:
        place = (name, event.group, event.tensor)
        wanted = []
        for made in event.made:
            for direction in made.directions:
                self._seen[name, event.tensor].add(direction.value)
                known = (*place, direction.value, None) in self._found
                if not (known and event.recomputed):
                    self._calls[*place, direction.value] += 1
                if not known:
                    wanted.append((made, direction))
        others = self._others(event, name)
        if event.source.numel() == 0 or not (wanted or others):
            return
        look = Look(event, self._settings, [(alternative, direction) for _, alternative, direction in others])
        for record in look.in_use(wanted):
            self._found[*place, record["direction"], None] = record
        for what_if, alternative, direction in others:
            self._found[*place, direction.value, what_if.label] = look.what_if(what_if.label, alternative, direction)

    def _others(self, event: PlanesMade, name: str) -> list[tuple[WhatIf, Any, Direction]]:
        """The formats that are not in use and were not looked at in this step."""
        if event.subject.from_rows:  # the tensor itself was quantized before
            return []
        module_type = "linear" if event.subject.group is None else "grouped_linear"
        found = []
        for what_if in self._settings.what_if:
            for direction, alternative in (what_if.alternatives(event.layer, event.tensor, module_type) or {}).items():
                if (name, event.group, event.tensor, direction.value, what_if.label) not in self._found:
                    found.append((what_if, alternative, direction))
        return found

    def _end_look(self, failed: bool = False, closing: bool = False) -> None:
        watching, self._watching = self._watching, None
        if watching is None:
            return
        try:
            watching.__exit__(None, None, None)
        except BaseException:
            failed = True  # what was seen before is written
            raise
        finally:
            with self._lock:
                began = self._found or not self._latest.looks
                if began or not closing:  # else it is a step after the last, perhaps with a validation
                    self._write_look(failed)

    def _write_look(self, failed: bool) -> None:
        start = time.thread_time()
        step = self.step_number
        records = [
            {"kind": "plane", "step": step, "layer": key[0], **record, "calls": self._calls[key[:4]]}
            for key, record in self._found.items()
        ]
        self._watch.see(records)
        missing = {} if failed else self._not_seen()
        reasons = {layer: found.why for layer, found in missing.items()}
        summary = {
            "kind": "look",
            "step": step,
            "planes": sum(record["what_if"] is None for record in records),
            "left_out": dict(self._left_out),
            "not_seen": reasons,
            "ended_with_an_error": failed,
        }
        if not self._latest.header:
            header = self._header(reasons)
            for writer in self._writers:
                writer.begin(header)
            self._latest.header = header
        summary["seconds"] = self._seconds + time.thread_time() - start
        for writer in self._writers:
            writer.write(step, records, summary)
        self._latest.records, self._latest.looks = records, [summary]
        self._latest.bad_step = self._watch.first
        self._begin_look()
        surprising = {layer: found.why for layer, found in missing.items() if found.surprising}
        if not failed and (not records or surprising) and surprising != self._warned:
            self._warned = surprising
            self._warn(surprising, bool(records), step)

    def _not_seen(self) -> dict[str, NotSeen]:
        missing = not_seen(self._model, self._names, self._seen)
        return {layer: found for layer, found in missing.items() if self._is_chosen(layer)}

    def _header(self, reasons: dict[str, str]) -> dict[str, Any]:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return {
            "kind": "header",
            "file_version": VERSION,
            "crossgrain": PACKAGE_VERSION,
            "torch": torch.__version__,
            "rank": dist.get_rank() if ranks > 1 else 0,
            "ranks": ranks,
            "every": self._every,
            "what_if": {what_if.label: str(what_if.recipe) for what_if in self._settings.what_if},
            "rows": self._settings.rows,
            "draws": self._settings.draws,
            "layers": self._patterns,
            "not_seen": reasons,
            "not_quantized": not_quantized(self._model),
        }

    def _footer(self) -> dict[str, Any]:
        bad = self._watch.first
        return {
            "kind": "end",
            "steps": self.step_number,
            "not_seen": {layer: found.why for layer, found in self._not_seen().items()},
            "first_bad_step": None if bad is None else bad.to_dict(),
        }

    def _warn(self, surprising: dict[str, str], anything: bool, step: int) -> None:
        """Say at once what should have been seen, because nobody reads a file before the end of a run."""
        named = "; ".join(f"{layer}: {why}" for layer, why in list(surprising.items())[:3])
        rest = f"; and {len(surprising) - 3} more" if len(surprising) > 3 else ""
        if anything:
            what = f"saw nothing of some layers that quantize, in step {step}: {named}{rest}"
        elif next(quantized_modules(self._model), None) is None:
            what = "has nothing to see: the model has no module that quantizes. Convert it first"
        elif self._patterns is not None and not named:
            what = f"saw no plane in step {step}: no layer that quantized has a name like {' or '.join(self._patterns)}"
        else:
            what = f"saw no plane in step {step}. {named or 'No layer of the model has quantized anything'}{rest}"
        warn(__name__, f"Inspector {what}. report() lists all layers.", once=False)  # each inspector says it


def _texts(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _several(to: Where) -> list[Any]:
    if to is None:
        return []
    return list(to) if isinstance(to, Sequence) and not isinstance(to, str) else [to]
