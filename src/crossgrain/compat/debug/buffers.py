"""`STATS_BUFFERS`: statistics wait here until ``debug_api.step()``, which merges those of ranks and logs them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ...runtime.collectives import group_size
from .statistics import Parts, Statistic, merged

Key = tuple[str, str, str]
"""Layer, tensor and feature."""


class Ranks(NamedTuple):
    """The ranks over which statistics are merged.

    Attributes:
        everywhere: merge them at all.
        group: the process group; None for all ranks.
    """

    everywhere: bool = True
    group: Any = None


ALL_RANKS = Ranks()
THIS_RANK = Ranks(everywhere=False)


class _Waiting(NamedTuple):
    statistics: tuple[Statistic, ...]
    parts: Parts
    iteration: int
    ranks: Ranks


class StatsBuffers:
    """Statistics of all layers since the last step. Threads of autograd feed it, too."""

    def __init__(self) -> None:
        self._waiting: dict[Key, _Waiting] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def reset(self) -> None:
        """Forget everything that waits."""
        with self._lock:
            self._waiting.clear()

    def has(self, key: Key) -> bool:
        """Whether a tensor was seen since the last step."""
        return key in self._waiting

    def parts(self, key: Key) -> Parts:
        """The parts of a tensor that was seen since the last step."""
        return self._waiting[key].parts

    def feed(
        self, key: Key, statistics: Sequence[Statistic], parts: Parts, iteration: int, ranks: Ranks = ALL_RANKS
    ) -> None:
        """Add a tensor to those of the same name that were seen in this step.

        Args:
            key: layer, tensor and feature.
            statistics: the statistics to log.
            parts: what they follow from. A statistic whose parts never come is not logged.
            iteration: the iteration to log them for.
            ranks: the ranks over which they are merged.
        """
        with self._lock:
            before = self._waiting.get(key)
            if before is not None:
                parts = merged([before.parts, parts])
            self._waiting[key] = _Waiting(tuple(statistics), parts, iteration, ranks)

    def log_stats(self) -> dict[tuple[str, str, str, int], float]:
        """Merge the statistics of ranks, and log them by ``MetricLogger`` of nvdlfw_inspect.

        Returns:
            The values by layer, tensor, name of the statistic and iteration.
        """
        from nvdlfw_inspect.logging import MetricLogger

        with self._lock:
            waiting, self._waiting = self._waiting, {}
        logged: dict[tuple[str, str, str, int], float] = {}
        for key, (statistics, parts, iteration, _) in _merged_over_ranks(waiting).items():
            layer, tensor, _ = key
            for statistic in statistics:
                if not all(need in parts for need in statistic.needs):
                    continue
                value = statistic.value(parts)
                MetricLogger.log_scalar(f"{layer}_{tensor}_{statistic.name}", value, iteration)
                logged[layer, tensor, statistic.name, iteration] = value
        return logged


def _merged_over_ranks(waiting: dict[Key, _Waiting]) -> dict[Key, _Waiting]:
    """The same with the parts of all ranks. Layers that only other ranks have are not logged here."""
    if not dist.is_available() or not dist.is_initialized():
        return waiting
    found: dict[Key, list[Parts]] = {}
    groups = {entry.ranks for entry in waiting.values() if entry.ranks.everywhere} | {Ranks(True, _common_group())}
    for ranks in sorted(groups, key=_order):
        own = {key: entry.parts for key, entry in waiting.items() if entry.ranks == ranks}
        for theirs in gathered(own, ranks.group):
            for key, parts in theirs.items():
                found.setdefault(key, []).append(parts)
    return {
        key: entry._replace(parts=merged(found[key])) if entry.ranks.everywhere else entry
        for key, entry in waiting.items()
    }


def _order(ranks: Ranks) -> list[int]:
    """Collectives must come in the same order on all ranks."""
    return [] if ranks.group is None else dist.get_process_group_ranks(ranks.group)


def _common_group() -> Any:
    """The group over which activations and gradients are merged, in which all ranks take part in every step."""
    import nvdlfw_inspect.api as debug_api

    return debug_api.get_tensor_reduction_group()


def gathered(own: Any, group: Any = None) -> list[Any]:
    """What every rank of a group has."""
    if not dist.is_available() or not dist.is_initialized() or group_size(group) == 1:
        return [own]
    found: list[Any] = [None] * group_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


STATS_BUFFERS = StatsBuffers()
