"""Every block of code in README and docs runs in the order of its page, or says why it does not."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import yaml

import crossgrain
from crossgrain.formats import registry
from docs.pictures import style
from docs.tools import tutorials
from tests.common.documentation import LANGUAGES, ROOT, blocks, pages, run_page, same_output

PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages()}
WITH_CODE = [
    name
    for name, path in PAGES.items()
    if any(block.language == "python" and block.not_run is None for block in blocks(path.read_text(encoding="utf-8")))
]
# `make test-docs` runs these; all others run in `make test`, too.
LONG = {f"docs/how-to/{name}.md" for name in ("lab", "lab_search", "replay", "report", "verify")}
LONG |= {f"docs/tutorials/{path.stem}.md" for path in tutorials.PROGRAMS.glob("*.py")}

# `make test-docs` has these; with another environment, what is missing is said.
NEEDED = {
    "docs/tutorials/llama.md": ("transformers",),
    "docs/tutorials/transformer_engine.md": ("megatron.core",),
    "docs/tutorials/export.md": ("safetensors",),
}


@pytest.fixture
def as_after_import(monkeypatch, tmp_path):
    """A page may register formats, change settings and levels of logs, join a process group and write files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(style, "IMAGES", tmp_path)
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    settings = {name: getattr(crossgrain.settings, name) for name in crossgrain.settings.__dataclass_fields__}
    with crossgrain.settings.override(**settings):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    crossgrain.compat.uninstall()
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "crossgrain"]:
        logging.getLogger(name).setLevel(logging.NOTSET)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in WITH_CODE]
)
def test_a_page_runs_and_prints_what_it_shows(name, as_after_import):
    for program in NEEDED.get(name, ()):
        pytest.importorskip(program)
    run_page(PAGES[name])


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is(name):
    text = PAGES[name].read_text(encoding="utf-8")
    for block in blocks(text):
        assert block.language in LANGUAGES, f"{name}:{block.line}: a block of {block.language!r}"
        if block.language == "bash":
            assert block.not_run, f"{name}:{block.line}: say why this is not run: <!-- not run: ... -->"
    plain = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"\n\n((?:    [^\n]*\n)+)", plain)
    assert not indented, f"{name}: put this into a block that has a language: {indented[0]}"


@pytest.mark.parametrize(
    "shown, printed, same",
    [
        ("a\nb\n", "a  \nb\n\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n...\nc\n", "a\nx\ny\nc\n", True),
        ("a\n...\nc\n", "a\nx\ny\n", False),
        ("1.5 (x)\n", "1_5 (x)\n", False),
    ],
)
def test_outputs_are_compared(shown, printed, same):
    assert same_output(shown, printed) is same


def test_numbers_that_vary_are_not_compared():
    assert same_output("gap 0.0012 ± 3e-05 GROWS\n", "gap   0.5 ± 0.25 GROWS\n", digits_vary=True)
    assert not same_output("gap 0.0012 GROWS\n", "gap 0.0012\n", digits_vary=True)


@pytest.mark.parametrize("program", sorted(tutorials.PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_the_page_of_a_tutorial_is_that_of_its_program(program):
    written = (tutorials.PAGES / f"{program.stem}.md").read_text(encoding="utf-8")
    without_outputs = re.sub(
        r"(<!-- digits vary -->\n)?```output\n.*?^```\n\n", "", written, flags=re.DOTALL | re.MULTILINE
    )
    assert without_outputs == tutorials.page(program), f"run: python -m docs.tools.tutorials {program.stem}"


def test_a_wrong_output_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```output\n2\n```\n")
    with pytest.raises(AssertionError, match="page.md:5: printed was\n1"):
        run_page(page)
    page.write_text(
        "<!-- not run: it waits -->\n```python\n1 / 0\n```\n<!-- setup\nx = 1\n-->\n\n```python\nassert x == 1\n```\n"
    )
    assert run_page(page)["x"] == 1


@pytest.mark.parametrize("name", PAGES)
def test_recipes_in_yaml_are_recipes(name):
    for block in blocks(PAGES[name].read_text(encoding="utf-8")):
        if block.language == "yaml" and block.not_run is None:
            document = yaml.safe_load(block.text)
            assert crossgrain.RecipeSchedule.load(document).phases(100), f"{name}:{block.line}"
