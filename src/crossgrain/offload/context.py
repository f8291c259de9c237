"""`offload`: a context manager that stores what autograd saves elsewhere until backward needs it."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Literal, NamedTuple

from torch.autograd.graph import saved_tensors_hooks

from .engine import Engine
from .store import DirectoryStore, HostStore, Store


class OffloadStats(NamedTuple):
    """Counts of bytes, see `Offload.stats`.

    Attributes:
        stored: bytes of all tensors that were moved to the store so far.
        shared: bytes of tensors that were not stored again because another operation had already saved them.
        kept: bytes of tensors that stayed in memory because they are too small or exceed the limit.
        used: bytes that the store occupies now.

    Examples:
        >>> context = cg.offload("host", min_bytes=0)
        >>> with context:
        ...     loss = (torch.ones(256, requires_grad=True) * 2).square().sum()
        >>> loss.backward()
        >>> context.stats.stored  # bytes
        1024
    """

    stored: int
    shared: int
    kept: int
    used: int


class Offload:
    """The context manager that `offload` returns.

    It can be entered again in every step, and inside itself. Several graphs may wait for their backward at a time.

    Examples:
        >>> context = cg.offload("host", min_bytes=0)
        >>> with context:
        ...     loss = (torch.ones(256, requires_grad=True) * 2).square().sum()
        >>> loss.backward()
        >>> context.stats.stored  # bytes
        1024
    """

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
        """Wait until all saved tensors are written.

        Raises:
            OffloadError: a tensor could not be written.
        """
        self._engine.wait()

    @property
    def stats(self) -> OffloadStats:
        """How many bytes were stored, shared and kept so far, and how many the store uses now."""
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
    """Store the tensors that autograd saves in host memory or in a file, until backward needs them.

    Args:
        where: "host" for host memory, or an existing directory in which an unnamed file is created.
        min_bytes: tensors smaller than this stay in memory.
        limit_bytes: the most bytes of host memory, or of the file, that may be used; None for no limit.
        over_limit: what to do with a tensor that would exceed the limit: "raise" an `OffloadError`, or "keep" the
            tensor in memory.
        prefetch: how many tensors are read ahead in backward.
        pending: how many tensors may wait to be written; the forward pass waits when there are more.

    Returns:
        A context manager; enter it around the forward pass.

    Raises:
        ValueError: an option is out of range.
        NotADirectoryError: ``where`` is not an existing directory.

    Examples:
        >>> x = torch.ones(4, requires_grad=True)
        >>> with cg.offload("host", min_bytes=0):
        ...     loss = (2 * x).square().sum()  # saves 2 * x, on the host
        >>> loss.backward()
        >>> x.grad
        tensor([8., 8., 8., 8.])
    """
    for name, value, least in (("min_bytes", min_bytes, 0), ("prefetch", prefetch, 0), ("pending", pending, 1)):
        if value < least:
            raise ValueError(f"offload: {name} must be >= {least}, got {value}")
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(f"offload: limit_bytes must be >= 0, got {limit_bytes}")
    if over_limit not in ("raise", "keep"):
        raise ValueError(f"offload: over_limit must be 'raise' or 'keep', got {over_limit!r}")
    store: Store = HostStore(limit_bytes) if where == "host" else DirectoryStore(where, limit_bytes)
    engine = Engine(
        store, min_bytes=min_bytes, prefetch=prefetch, pending=pending, keep_over_limit=over_limit == "keep"
    )
    return Offload(engine)
