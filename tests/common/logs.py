"""What crossgrain logs, for tests that expect it, or that expect nothing."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class _Keeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Context manager: the list of warnings of crossgrain that are logged inside."""
    keeper, logger = _Keeper(), logging.getLogger("crossgrain")
    logger.addHandler(keeper)
    try:
        yield keeper.records
    finally:
        logger.removeHandler(keeper)


@contextmanager
def warned(match: str) -> Iterator[list[logging.LogRecord]]:
    """Context manager: what `pytest.warns` is for `warnings`. A warning of crossgrain inside must have this pattern."""
    with logged() as records:
        yield records
    messages = [record.getMessage() for record in records]
    assert any(re.search(match, message) for message in messages), f"no warning has {match!r}, only {messages}"


@contextmanager
def silent() -> Iterator[None]:
    """Context manager: neither crossgrain nor anybody else may warn inside."""
    with logged() as records, warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not [record.getMessage() for record in records]


def raise_warnings() -> None:
    """Make errors of the warnings of crossgrain, for the rest of this process."""
    logging.getLogger("crossgrain").addHandler(_Raiser(logging.WARNING))


class _Raiser(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record.getMessage())
