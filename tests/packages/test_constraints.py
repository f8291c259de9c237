"""Pinned versions: what is named is pinned once, below a reason, where the environment that needs it reads it."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in (ROOT / "constraints").glob("*.txt")}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(PINS)", "constraints")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def pins(stem: str) -> list[str]:
    return [name_of(line) for line in FILES[stem] if "==" in line and not line.startswith("#")]


def with_what_it_is_built_on(stem: str) -> set[str]:
    below = [line.removeprefix("-c ").removesuffix(".txt") for line in FILES[stem] if line.startswith("-c ")]
    return set(pins(stem)).union(*map(with_what_it_is_built_on, below))


def named_by(extra: str) -> set[str]:
    found: set[str] = set()
    for requirement in PROJECT["project"]["optional-dependencies"][extra]:
        inner = re.fullmatch(r"crossgrain\[([\w,]+)\]", requirement)
        found |= set().union(*map(named_by, inner[1].split(","))) if inner else {name_of(requirement)}
    return found


LIBRARY = {name_of(each) for each in PROJECT["project"]["dependencies"]}
DIRECT = LIBRARY.union(
    {name_of(each) for each in PROJECT["build-system"]["requires"]},
    {"pip", "build"},  # by the Makefile
    *map(named_by, PROJECT["project"]["optional-dependencies"]),
)


def test_everything_is_pinned_once():
    everything = sorted(name for stem in FILES for name in pins(stem))
    assert everything == sorted(set(everything))
    assert set(everything) >= DIRECT


@pytest.mark.parametrize("stem", FILES)
def test_a_reason_stands_above_what_is_named_and_above_nothing_else(stem):
    above = {name_of(line): before for before, line in pairwise(FILES[stem]) if "==" in line}
    explained = {name for name, before in above.items() if re.match(r"# \S.*\.$", before)}
    (heading,) = [line for line in FILES[stem] if line.startswith("# What these bring along")]
    first = FILES[stem].index(heading)
    brought = [name_of(line) for line in FILES[stem][first + 1 :]]
    assert brought == sorted(brought) and not DIRECT & set(brought)
    assert explained - set(brought[:1]) == DIRECT & set(pins(stem)), "the first of the rest stands below the heading"


@pytest.mark.parametrize("stem", FILES)
def test_the_makefile_uses_each_file_and_installs_again_when_it_changes(stem):
    assert f"-c constraints/{stem}.txt " in MAKEFILE
    shared = re.search(r"^TEST_PINS := (.*)$", MAKEFILE, re.MULTILINE)[1]
    environments = re.findall(r"^\$\(\w+\)(?:/\.installed)?: (.*PINS.*)$", MAKEFILE, re.MULTILINE)
    used = " ".join(environments).replace("$(TEST_PINS)", shared)
    assert f"constraints/{stem}.txt" in used
    assert len(environments) == 6


def test_each_environment_reads_the_pins_of_what_it_installs():
    installs = re.findall(r"-c constraints/(\w+)\.txt --no-build-isolation -e '\.\[([\w,]+)\]'", MAKEFILE)
    assert {stem for stem, _ in installs} == {"test", "clients"}
    for stem, extras in installs:
        wanted = LIBRARY.union(*map(named_by, extras.split(",")))
        assert wanted <= with_what_it_is_built_on(stem), f"{stem}.txt lacks pins of [{extras}]"
    assert named_by("docs") <= set(pins("docs"))
    assert {"build", "mypy", *LIBRARY, *named_by("cli")} <= with_what_it_is_built_on("dist")


def test_gpus_have_a_torch_and_a_triton_of_their_own():
    (line,) = [line for line in MAKEFILE.splitlines() if "> $(GPU)/constraints.txt" in line]
    left_out = re.compile("|".join(re.findall(r"-e '([^']+)'", line)))
    kept = [each for stem in ("core", "test") for each in FILES[stem] if not left_out.search(each)]
    gone = {name_of(each) for stem in ("core", "test") for each in FILES[stem] if "==" in each} - {
        name_of(each) for each in kept if "==" in each
    }
    assert gone == {"torch", "triton"} and not [each for each in kept if each.startswith("-c")]
