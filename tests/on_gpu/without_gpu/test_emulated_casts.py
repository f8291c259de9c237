"""Casts as they are compiled for GPUs, by the emulator of PTX, on some fp32 numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from crossgrain.kernels.triton.traits import cuda_traits

from ...gpu.kernels.emulated import CAPABILITIES, Emulated
from ..casts import ALL_NUMBERS, Cast, Chunk, _spread, casts, check_cast
from ..finding import Deadline
from ..stochastic_instruction import check_instruction

CPU = torch.device("cpu")
ON_BLACKWELL = casts(Emulated("sm_100"), cuda_traits((10, 0)))
QUICK = ("e4m3, nearest by hardware", "e2m1, nearest by hardware", "e2m3, stochastic")


def _checked(cast: Cast, chunks: int = 2, size: int = 1 << 12):
    return check_cast(cast, CPU, Deadline(1e6), size=size, chunks=chunks)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in ON_BLACKWELL]
)
def test_compiled_casts_are_those_of_the_reference(name):
    found = _checked(ON_BLACKWELL[name])
    assert found.problems == [] and found.numbers["inputs"] == 1 << 13


@pytest.mark.long
@pytest.mark.parametrize("target", CAPABILITIES)
def test_every_cast_on_every_target(target):
    for name, cast in casts(Emulated(target), cuda_traits(CAPABILITIES[target])).items():
        assert _checked(cast, chunks=64).problems == [], name


def test_there_is_a_cast_for_every_way():
    assert len(ON_BLACKWELL) == 16
    assert len(casts(Emulated("sm_80"), cuda_traits((8, 0)))) == 13


def test_a_wrong_cast_is_found():
    right = casts(Emulated("sm_80"), cuda_traits((8, 0)))["int8, nearest"]
    off_by_one = dataclasses.replace(right, run=lambda chunk: right.expected(chunk.numbers(), chunk.random) ^ 1)
    found = _checked(off_by_one, chunks=1)
    assert found.numbers["wrong"] == 1 << 12
    assert "4096 results differ; the first, of the bits 0x80000000: " in found.problems[0]


def test_a_reference_that_differs_between_devices_is_found(monkeypatch):
    calls = iter(range(100))
    same = Cast(lambda chunk: chunk.random * 0, lambda numbers, random: random * 0 + next(calls))
    assert any("the reference itself differs" in problem for problem in _checked(same, chunks=1).problems)


def test_chunks_are_all_numbers_and_the_first_are_from_everywhere():
    assert sorted(_spread(256)) == list(range(256))
    assert list(_spread(4)) == [0, 2, 1, 3] and list(_spread(1)) == [0]
    assert ALL_NUMBERS == 2**32


def test_the_last_chunk_ends_with_the_last_number():
    chunk = Chunk(2**31 - 4096, 4096, torch.zeros(4096, dtype=torch.uint8))
    assert chunk.numbers().view(torch.int32)[-1] == 2**31 - 1


def test_time_that_is_over_is_told():
    found = check_cast(ON_BLACKWELL["bf16"], CPU, Deadline(-1.0))
    assert found.numbers["share_of_all"] == 0 and found.problems == ["no time was left for any number"]


def test_the_stochastic_instruction_as_this_project_reads_it():
    """The emulator has the project's reading. The check must find it, bit by bit."""
    found = check_instruction(Emulated("sm_100"), CPU, count=256)
    assert found.problems == []
    for place, changes in enumerate(found.numbers["share_changed_by_bit"]):
        own = range(8 * place, 8 * place + 8)
        assert all((share > 0) == (bit in own) for bit, share in enumerate(changes) if bit not in own or bit % 8 > 4)


def test_another_byte_order_is_found():
    """Random words with swapped bytes are a GPU with another order."""
    inner = Emulated("sm_100")

    def swapped(kernel, programs, device, warps, arguments):
        swapped_words = (
            arguments["random"].view(torch.uint8).view(-1, 4).flip(1).contiguous().view(torch.int32).view(-1)
        )
        inner(kernel, programs, device, warps, {**arguments, "random": swapped_words})

    found = check_instruction(swapped, CPU, count=256)
    assert len(found.problems) == 4 and "number 0 is not rounded with byte 0" in found.problems[0]
    assert [row.index(1.0) for row in found.numbers["share_explained_by_byte"]] == [3, 2, 1, 0]
