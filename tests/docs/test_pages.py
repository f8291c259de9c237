"""Pages say what is there: links, pictures, commands, options, targets of make, extras, names."""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from docs.tools import reference
from docs.tools.public_names import public_names
from tests.common.documentation import DOCS, ROOT, blocks, pages

ALL = {path.relative_to(ROOT).as_posix(): path for path in [*pages(), ROOT / "CHANGELOG.md"]}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())


# ---- what is written from the code -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.name)
def test_the_reference_is_that_of_the_code(path):
    written = path.read_text(encoding="utf-8")
    assert written == reference.pages()[path], "run: python -m docs.tools.reference"


def test_every_public_name_has_a_summary_and_a_place():
    names = public_names()
    assert len(names) > 250
    assert [name.path for name in names if not name.summary] == []
    for name in names:
        page = (DOCS / "reference" / "api" / f"{name.page}.md").read_text(encoding="utf-8")
        assert re.search(rf"(^::: |#){re.escape(name.source)}\b", page, re.MULTILINE) or f"`{name.path}`" in page


def test_every_variable_that_the_library_reads_is_on_the_page():
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    page += (DOCS / "how-to" / "transformer_engine.md").read_text(encoding="utf-8")  # has those that change no number
    for path in (ROOT / "src").rglob("*.py"):
        for name in re.findall(r'"((?:CROSSGRAIN|NVTE)_\w+)"', path.read_text(encoding="utf-8")):
            assert f"`{name}`" in page or f"`{name}=" in page, f"{path}: {name}"


# ---- links and pictures ------------------------------------------------------------------------------------------


@cache
def places(path: Path) -> set[str]:
    """The anchors of a page, as sites make them from headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(r"\{: #(\S+) \}", text)) | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\{:.*\}", "", heading).strip().lower()
        found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain)).strip("-"))
    return found


@pytest.mark.parametrize("name", [*ALL, *(path.relative_to(ROOT).as_posix() for path in reference.pages())])
def test_links_lead_somewhere(name):
    path = ROOT / name
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for address in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if "://" in address:
            continue
        file, _, anchor = address.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name}: {address}"
        if DOCS in path.parents:
            assert target.is_relative_to(DOCS), f"{name}: {address} is not on the site"
        if anchor and target.suffix == ".md":
            assert anchor in places(target), f"{name}: {address}: no such heading"


def test_pictures_have_alternative_texts_and_are_all_used():
    shown = set()
    for name, path in ALL.items():
        for text, address in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert len(text) > 20, f"{name}: {address} needs an alternative text"
            shown.add((path.parent / address).resolve())
    assert set((DOCS / "images").iterdir()) == shown


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


# ---- commands ----------------------------------------------------------------------------------------------------


def test_targets_of_make_are_listed():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Set-up")[2].partition("\n## ")[0]
    head = MAKEFILE.partition("\n\n")[0]
    for target in TARGETS - {"setup"}:
        assert re.search(rf"^\| `make {target}` ", table, re.MULTILINE), f"CONTRIBUTING.md does not list make {target}"
        assert re.search(rf"make {target}\b", head), f"the head of the Makefile does not list make {target}"


@pytest.mark.parametrize("name", ALL)
def test_pages_name_targets_that_are_there(name):
    text = ALL[name].read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named <= TARGETS, f"{name}: {named - TARGETS}"


@cache
def options() -> dict[str, set[str]]:
    """Options by command, from the page that follows from the code."""
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    parts = re.split(r"^## `crossgrain ?(.*)`$", page, flags=re.MULTILINE)[1:]
    return {
        name: set(re.findall(r"`(--?[a-z][\w-]*)`", text)) for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("name", ALL)
def test_pages_name_commands_and_options_that_are_there(name):
    text = ALL[name].read_text(encoding="utf-8")
    inline = re.findall(r"`(crossgrain [^`\n]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    shell = [line for block in blocks(text) if block.language == "bash" for line in block.text.splitlines()]
    for line in [*inline, *shell]:
        try:
            words = shlex.split(line.replace("...", ""), comments=True)
        except ValueError:
            continue  # a line that goes on
        if words[:1] != ["crossgrain"]:
            continue
        words = words[1:]
        if words[:1] == ["--import"]:
            words = words[2:]
        command = next(iter(words), "")
        if not command or command.startswith("-"):
            continue
        assert command in options(), f"{name}: {line}"
        given = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
        assert given <= options()[command] | {"--help"}, f"{name}: {line}"


def test_extras_and_packages_have_a_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "start" / "install.md").read_text(encoding="utf-8")
    extras = project["optional-dependencies"]
    listed = {re.split(r"[\[<>=]", each)[0] for group in (project["dependencies"], *extras.values()) for each in group}
    missing = {name for name in listed - {"crossgrain", "einops"} if name.removesuffix("-python") not in page}
    assert not missing
    assert not {name for name in extras if not re.search(rf"\b{name}\b", page)}


def test_files_name_pages_that_are_there():
    files = [path for part in ("src", "tests", "examples", "benchmarks") for path in (ROOT / part).rglob("*.py")]
    for path in files:
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), f"{path}: {page}"
