"""Mutations of every kind of file: refused with a documented error, or read bit for bit; never a bomb, never a hang."""

from __future__ import annotations

import random
import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from .file_kinds import KINDS, Kind

# More than reading any of these files takes, and much less than the sizes that mutations claim.
SPARE_BYTES = 1 << 30
SECONDS = 60  # for one file; they take milliseconds

# Errors that only the reader of a library's source understands, also where they are a kind of ValueError.
NEVER = (UnicodeError, RecursionError, MemoryError, NotImplementedError)
BOMB = "DefaultCPUAllocator"


@contextmanager
def limited() -> Iterator[None]:
    """Limit the memory that is allocated, and raise in whatever hangs."""

    def hangs(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {SECONDS} seconds")

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, hangs)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def attack(kind: Kind, whole: Any, number: int) -> None:
    """Read one mutation of a file."""
    draw = random.Random(f"{type(kind).__name__} {number}")
    how, read = kind.mutation(draw)
    try:
        try:
            with limited():
                result = read()
        except kind.refusals as error:
            if isinstance(error, NEVER) or BOMB in str(error) or not str(error):
                raise
            kind.check_unchanged()
            return
        if kind.sealed:
            assert result.keys() == whole.keys() and all(torch.equal(result[key], whole[key]) for key in whole), (
                "it was read, but not as it was"
            )
        else:
            kind.check_usable(result)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        pytest.fail(
            f"mutation {number} of {type(kind).__name__}, {how}:\n{trace[-3000:]}\n"
            f"Run it again: pytest tests/attack/test_files.py -k {type(kind).__name__} --seed {number} --mutations 1",
            pytrace=False,
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mutations_of(kind, mutations, tmp_path):
    made = kind(tmp_path)
    whole = made.whole()
    for number in mutations:
        attack(made, whole, number)
