"""Runs on the emulated device, by name. Those in SHORT show each way through the library once."""

from . import attention, experts, models, modules, operations, optimizers, ranks, shards, tensors, training_loops
from .common import Run

_ALL = (modules, attention, experts, operations, models, optimizers, training_loops, tensors, ranks, shards)

RUNS: dict[str, Run] = {name: run for each in _ALL for name, run in each.RUNS.items()}
SHORT: list[str] = [name for each in _ALL for name in each.SHORT]
