"""Reading the pages of the documentation: their blocks of code, what runs them, and what compares what they print.

A page is run from top to bottom, as a reader would type it. What a reader need not see stands in comments:

    <!-- setup                      code that runs, such as a small model for a page that is not about it
    model = ...
    -->
    <!-- not run: the reason -->    right before a block that cannot run here

A block ``output`` is compared with what was printed since the block before it; a line ``...`` stands for any lines.
After ``<!-- digits vary -->`` it is compared without its numbers, which depend on the machine there.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("python", "output", "yaml", "bash", "text")

_PARTS = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^<!-- not run: (?P<reason>[^\n]+?) -->$"
    r"|^(?P<vary><!-- digits vary -->\n)?```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, its text, its first line, why it is not run, and how it is compared."""

    language: str
    text: str
    line: int
    not_run: str | None = None
    digits_vary: bool = False


def pages() -> list[Path]:
    """All pages that people have written."""
    written = [path for path in DOCS.rglob("*.md") if "api" not in path.parts]
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written])


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page in their order; code of ``setup`` comments is Python."""
    reason: str | None = None
    end = 0
    for found in _PARTS.finditer(text):
        if text[end : found.start()].strip():
            assert reason is None, f"nothing follows <!-- not run: {reason} -->"
        end = found.end()
        line = text.count("\n", 0, found.start()) + 1
        if found["reason"] is not None:
            reason = found["reason"]
        elif found["setup"] is not None:
            yield Block("python", found["setup"], line)
        else:
            yield Block(found["language"], found["code"], line, reason, found["vary"] is not None)
            reason = None


def same_output(shown: str, printed: str, *, digits_vary: bool = False) -> bool:
    """Whether a page shows what was printed. Blanks at the ends of lines do not count."""
    if digits_vary:
        shown, printed = _without_numbers(shown), _without_numbers(printed)
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    pattern = "\n".join(r"(?:.*\n)*?.*" if line == "..." else re.escape(line) for line in lines)
    text = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None


def _without_numbers(text: str) -> str:
    """The words of a text: numbers are gone, and so are blanks and lines of tables, whose widths depend on them."""
    return re.sub(r"[ ─]+", " ", re.sub(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?", "#", text))


def run_page(path: Path) -> dict[str, object]:
    """Run the Python blocks of a page in one namespace, and compare what they print with what is shown.

    Returns:
        The namespace.

    Raises:
        AssertionError: a page shows something that was not printed.
        Exception: what a block raises, at its line of the page.
    """
    scope: dict[str, object] = {"__name__": "__page__"}
    printed = io.StringIO()
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.not_run is not None:
            continue
        if block.language == "python":
            source = "\n" * block.line + block.text  # so that a traceback names the line of the page
            with contextlib.redirect_stdout(printed):
                exec(compile(source, str(path), "exec"), scope)
        elif block.language == "output":
            text = printed.getvalue()
            assert same_output(block.text, text, digits_vary=block.digits_vary), (
                f"{path}:{block.line}: printed was\n{text}"
            )
            printed = io.StringIO()
    return scope
