"""Tell other ranks why this rank does not take part in a collective.

A rank may raise an error that only it can know, such as a wrong shape of its own input. It then writes the reason to
the store of the process group (`telling_others`). Ranks that wait for it read the reason there when their collective
fails, by a timeout or a broken connection (`communicate`). As long as there is no error, nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_told = False  # whether the store has a reason of this rank


class OtherRankFailed(RuntimeError):
    """Another rank raised an error before the collective. The message has its error."""


@contextmanager
def telling_others(where: str) -> Iterator[None]:
    """A context manager: ranks that wait for this one can read the errors that are raised inside.

    Args:
        where: what this rank was doing, for the message.
    """
    try:
        yield
    except Exception as error:
        _leave(str(error) if isinstance(error, OtherRankFailed) else f"{where}: {type(error).__name__}: {error}")
        raise


def communicate(collective: Callable[..., Any], *tensors: Any, group: Any, **options: Any) -> Any:
    """Run a collective of torch.

    Args:
        collective: the function of torch.distributed.
        *tensors: its arguments.
        group: the process group; None for all ranks.
        **options: its other arguments.

    Raises:
        OtherRankFailed: the collective failed, and a rank of the group has written a reason.
    """
    if _told:
        _take_back()  # the error was caught, and this rank continues
    try:
        return collective(*tensors, group=group, **options)
    except RuntimeError as error:
        reasons = _left_by_others(group)
        if not reasons:
            raise
        raise OtherRankFailed("; ".join(reasons)) from error


def _leave(reason: str) -> None:
    global _told
    if dist.is_available() and dist.is_initialized():
        _told = True
        _store().set(_key(dist.get_rank()), reason)


def _take_back() -> None:
    global _told
    _told = False
    if dist.is_initialized():
        _store().delete_key(_key(dist.get_rank()))


def _left_by_others(group: Any) -> list[str]:
    """The reasons that other ranks of ``group`` have written, each once."""
    found = {}
    try:
        for rank in dist.get_process_group_ranks(group):
            if rank != dist.get_rank() and _store().check([_key(rank)]):
                reason = _store().get(_key(rank)).decode()
                found[reason] = reason if reason.startswith("rank ") else f"rank {rank}: {reason}"
    except (RuntimeError, ValueError):  # the rank that has the store is gone as well
        return []
    return list(dict.fromkeys(found.values()))


def _key(rank: int) -> str:
    return f"crossgrain/raised/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
