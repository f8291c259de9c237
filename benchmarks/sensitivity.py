"""What measuring a sensitivity costs: time in forward and backward passes of the model, and memory against training."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from crossgrain.gpt import GPTConfig
from crossgrain.lab.gpt_checkpoint import GPTCheckpoint
from crossgrain.lab.sensitivity import sensitivity

CONFIG = GPTConfig(layers=4, width=256, heads=4, context=256)
QUICK_CONFIG = GPTConfig(layers=1, width=64, heads=2, context=32)
BATCH, BATCHES = 4, 4
CANDIDATES = ("mxfp8", "nvfp4", "nvfp4(2d, rht, sr)")


@dataclass(frozen=True)
class Timing:
    """The cost of one candidate.

    Attributes:
        candidate: its label.
        one_pass: fprop and wgrad of all sites, in forward and backward passes of a batch.
        dgrad: one group of layers in dgrad, in the same unit.
        memory: peak memory of the process, relative to that of training steps with AdamW; None if it was not measured.
    """

    candidate: str
    one_pass: float
    dgrad: float
    memory: float | None


def run(config: GPTConfig, only: str, repeats: int) -> list[Timing]:
    found = []
    for candidate in CANDIDATES:
        if only in candidate:
            memory = None  # a small model shows only what the process itself takes
            if config != QUICK_CONFIG:
                memory = _peak(_measure, config, candidate) / _peak(_train, config, candidate)
            found.append(Timing(candidate, *_least(config, candidate, repeats), memory))
    return found


def _least(config: GPTConfig, candidate: str, repeats: int) -> tuple[float, float]:
    """The least of interleaved repeats: a plain pass, and the two parts of a measurement."""
    start = GPTCheckpoint(config, BATCH, 1e-3)
    _parts(start, candidate)  # kernels are compiled
    found = [(_plain(start), *_parts(start, candidate)) for _ in range(repeats)]
    plain, one_pass, dgrad = (min(times) for times in zip(*found, strict=True))
    return one_pass / plain, dgrad / plain


def _plain(start: GPTCheckpoint) -> float:
    model, _ = start.restored()
    batches = start.batches(BATCHES)
    begin = time.process_time()
    for batch in batches:
        model.zero_grad()
        start.loss(model, batch).backward()
    return time.process_time() - begin


def _parts(start: GPTCheckpoint, candidate: str) -> tuple[float, float]:
    """CPU seconds of fprop and wgrad, and of dgrad for each group."""
    return _timed(start, *start.restored(), candidate)


def _timed(
    start: GPTCheckpoint, model: nn.Module, optimizer: torch.optim.Optimizer, candidate: str
) -> tuple[float, float]:
    ends: dict[str, float] = {}

    def note(part: float, text: str) -> None:
        ends["dgrad" if "dgrad" in text else text] = time.process_time()

    sensitivity(
        model,
        start.batches(BATCHES),
        start.loss,
        base="hp",
        candidates=[candidate],
        optimizer=optimizer,
        groups="kind",
        count=BATCHES,
        on_progress=note,
    )
    groups = 4  # qkv, proj, fc1, fc2; and one pass in high precision for each batch
    return ends["fprop and wgrad"] - ends["high precision"], (ends["dgrad"] - ends["fprop and wgrad"]) / (groups + 1)


def _train(config: GPTConfig, candidate: str) -> None:
    _trained(config)


def _measure(config: GPTConfig, candidate: str) -> None:
    _timed(*_trained(config), candidate)


def _trained(config: GPTConfig) -> tuple[GPTCheckpoint, nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps, with the memory of training."""
    start = GPTCheckpoint(config, BATCH, 1e-3)
    model, optimizer = start.restored()
    for batch in start.batches(2):
        optimizer.zero_grad()
        start.loss(model, batch).backward()
        optimizer.step()
    return start, model, optimizer


def _peak(work: Callable[[GPTConfig, str], None], config: GPTConfig, candidate: str) -> float:
    """Peak memory of a new process that does the work, without what it has after importing."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_here, (work, config, candidate))


def _peak_here(work: Callable[[GPTConfig, str], None], config: GPTConfig, candidate: str) -> float:
    torch.set_num_threads(1)
    _parts(GPTCheckpoint(QUICK_CONFIG, BATCH, 1e-3), candidate)  # kernels are loaded
    before = _peak_of_process()
    work(config, candidate)
    return _peak_of_process() - before


def _peak_of_process() -> float:
    """Peak memory in KiB, from Linux; getrusage would begin with that of the parent. NaN elsewhere."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((float(line.split()[1]) for line in lines if line.startswith("VmHWM")), math.nan)


def rows(timings: list[Timing]) -> list[list[str]]:
    """Cells of a table."""
    return [[t.candidate, f"{t.one_pass:.2f}", f"{t.dgrad:.2f}", _ratio(t.memory)] for t in timings]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
