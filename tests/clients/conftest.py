"""A process that has Megatron, and CUDA calls answered by the CPU, so that the process of the tests has neither.

It has imported everything once; the ranks of every test are forked from it.
"""

import importlib.util
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import crossgrain as cg

from ..common import ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron"


class Parent:
    """Of ranks: ``parent(work, ranks, *args)`` is ``work(rank, *args)`` of every rank, in order."""

    def __init__(self, folder: Path) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs, self._pipe, folder))
        self._process.start()
        theirs.close()

    def __call__(self, work: Callable[..., Any], count: int, *args: Any) -> list[Any]:
        self._pipe.send_bytes(pickle.dumps((work, count, args)))
        failed, found = pickle.loads(self._pipe.recv_bytes())
        if failed:
            raise AssertionError(f"of a rank:\n{found}")
        return found

    def end(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Any, of_tests: Any, folder: Path) -> None:
    of_tests.close()
    sys.path.insert(0, str(EXAMPLE))
    import small_gpt  # noqa: F401

    for recipe in ("fp8", "fp8-block", "mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd"):
        train_a_layer(recipe)  # so that ranks have the kernels
    while True:
        try:
            work, count, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = False, ranks.run(work, count, folder, *args)
        except Exception:
            answer = True, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


def train_a_layer(recipe: str) -> None:
    layer = cg.Linear(128, 128, params_dtype=torch.bfloat16)
    with cg.autocast(recipe=recipe):
        layer(torch.ones(128, 128, dtype=torch.bfloat16)).sum().backward()


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("Megatron-core is not installed: make test-clients")
    parent = Parent(tmp_path_factory.mktemp("megatron"))
    yield parent
    parent.end()
