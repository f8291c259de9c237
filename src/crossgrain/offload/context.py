"""The context in which tensors that autograd saves are stored elsewhere until backward asks for them."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Literal, NamedTuple

from torch.autograd.graph import saved_tensors_hooks

from .engine import Engine
from .store import DirectoryStore, HostStore, Store


class OffloadStats(NamedTuple):
    """Bytes of the tensors packed so far, and what the store takes now.

    ``stored``  of tensors that went to the store
    ``shared``  of tensors that were there already, saved by another operation
    ``kept``    of tensors that stay in memory as too small, or beyond the limit
    ``used``    by the store, at the moment
    """

    stored: int
    shared: int
    kept: int
    used: int


class Offload:
    """Made by `offload`. May be entered again, also inside itself, and outlives its graphs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entered: list[saved_tensors_hooks] = []

    def __enter__(self) -> Offload:
        self._engine.store.check_process()
        hooks = self._engine.hooks()
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)
        if kind is None:
            self._engine.raise_failure()

    def wait(self) -> None:
        """Until all that was saved is stored; raises if something could not be."""
        self._engine.wait()

    @property
    def stats(self) -> OffloadStats:
        """How much went where."""
        engine = self._engine
        return OffloadStats(engine.stored_bytes, engine.shared_bytes, engine.kept_bytes, engine.store.used)


def offload(
    where: str | os.PathLike[str] = "host",
    *,
    min_bytes: int = 1 << 16,
    limit_bytes: int | None = None,
    over_limit: Literal["raise", "keep"] = "raise",
    prefetch: int = 4,
    pending: int = 4,
) -> Offload:
    """Store what autograd saves in this context in host memory, or in a file in the directory ``where``.

    >>> with crossgrain.offload("/scratch", limit_bytes=50 * 2**30):
    ...     loss = model(x).square().mean()
    >>> loss.backward()

    ``min_bytes``    smaller tensors stay in memory
    ``limit_bytes``  of host memory or of the file; what to do beyond is ``over_limit``: raise `OffloadError`, or keep
                     the tensor in memory
    ``prefetch``     tensors that are read ahead in backward
    ``pending``      tensors that may wait to be written
    """
    for name, value, least in (("min_bytes", min_bytes, 0), ("prefetch", prefetch, 0), ("pending", pending, 1)):
        if value < least:
            raise ValueError(f"offload: {name} is at least {least}, not {value}")
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(f"offload: limit_bytes is at least 0, not {limit_bytes}")
    if over_limit not in ("raise", "keep"):
        raise ValueError(f"offload: over_limit is 'raise' or 'keep', not {over_limit!r}")
    store: Store = HostStore(limit_bytes) if where == "host" else DirectoryStore(where, limit_bytes)
    engine = Engine(
        store, min_bytes=min_bytes, prefetch=prefetch, pending=pending, keep_over_limit=over_limit == "keep"
    )
    return Offload(engine)
