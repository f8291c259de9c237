"""Why another rank does not answer: what it raised before it came to communicate.

A rank may raise for a reason that only it can know, such as the shape of its own input. It leaves the reason in the
store of the process group (`telling_others`), and who waits for it in vain finds it there (`communicate`), when the
timeout is over or the connection breaks. As long as nothing goes wrong, nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_told = False  # whether others may find a reason of this rank


class OtherRankFailed(RuntimeError):
    """Another rank raised before it came to communicate; the message says what."""


@contextmanager
def telling_others(where: str) -> Iterator[None]:
    """What is raised inside can be read by ranks that wait for this one."""
    try:
        yield
    except Exception as error:
        _leave(str(error) if isinstance(error, OtherRankFailed) else f"{where}: {type(error).__name__}: {error}")
        raise


def communicate(collective: Callable[..., Any], *tensors: Any, group: Any, **options: Any) -> Any:
    """A collective of torch; if a rank of ``group`` does not take part, because it raised, that is the error."""
    if _told:
        _take_back()  # whoever caught it goes on, and so does this rank
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
    """Reasons of ranks of ``group``, each once."""
    found = {}
    try:
        for rank in dist.get_process_group_ranks(group):
            if rank != dist.get_rank() and _store().check([_key(rank)]):
                reason = _store().get(_key(rank)).decode()
                found[reason] = reason if reason.startswith("rank ") else f"rank {rank}: {reason}"
    except (RuntimeError, ValueError):  # whoever had the store has left as well
        return []
    return list(dict.fromkeys(found.values()))


def _key(rank: int) -> str:
    return f"crossgrain/raised/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
