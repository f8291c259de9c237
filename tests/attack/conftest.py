"""Options of the random programs: how many to run, which, and a fixture that hands them out in parts."""

from __future__ import annotations

import pytest

PROGRAMS = 100  # of each kind, unless asked for more
PART = 10  # programs in one test, so that processes can share the work
MUTATIONS = 30  # of each kind of file


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attack", "random programs of tests/attack")
    group.addoption("--programs", type=int, default=PROGRAMS, help="number of random programs of each kind")
    group.addoption("--mutations", type=int, default=MUTATIONS, help="number of mutations of each kind of file")
    group.addoption("--seed", type=int, default=0, help="number of the first program, and of the first mutation")
    group.addoption("--steps", default=None, help="run only these steps of a program: 0,3,7")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument ``seeds`` gets the numbers of its programs, in parts."""
    if "seeds" not in metafunc.fixturenames:
        return
    # If the whole suite runs, pytest reads this file after the command line.
    first = metafunc.config.getoption("seed", 0)
    end = first + metafunc.config.getoption("programs", PROGRAMS)
    parts = [range(start, min(start + PART, end)) for start in range(first, end, PART)]
    metafunc.parametrize("seeds", parts, ids=lambda part: f"{part[0]}-{part[-1]}")


@pytest.fixture
def chosen_steps(request: pytest.FixtureRequest) -> list[int] | None:
    """The numbers of the steps to run; None for all of them."""
    steps = request.config.getoption("steps", None)
    return None if steps is None else [int(number) for number in steps.split(",")]


@pytest.fixture
def mutations(request: pytest.FixtureRequest) -> range:
    """The numbers of the mutations of each kind of file."""
    first = request.config.getoption("seed", 0)
    return range(first, first + request.config.getoption("mutations", MUTATIONS))
