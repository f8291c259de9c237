"""Runs the tutorials and writes their pages with what they printed: ``python -m docs.tools.tutorials [name ...]``.

A tutorial is a program of cells in ``examples/tutorials``:

    # %% [markdown]     text, in comments
    # %%                code; what it prints is shown after it, and compared
    # %% digits vary    the same, but numbers depend on the machine, and are not compared
    # %% hidden         code that readers need not see, such as what draws a picture

The page is run again by the tests, as all pages are, and its outputs are compared. So print few digits.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "tutorials"
PAGES = ROOT / "docs" / "tutorials"


def cells(program: str) -> Iterator[tuple[str, str]]:
    """Kind ("markdown", "hidden", "digits vary" or "") and text of each cell."""
    parts = re.split(r"^# %%(.*)$", program, flags=re.MULTILINE)[1:]
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        kind = kind.strip().strip("[]")
        if kind == "markdown":
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        yield kind, text.strip("\n")


def page(program: Path, outputs: list[str] | None = None) -> str:
    """The page of a tutorial. Without outputs, as it is before the program has run.

    Args:
        program: its file.
        outputs: what each cell of code printed.
    """
    written = [f"<!-- Written by `python -m docs.tools.tutorials` from `examples/tutorials/{program.name}`. -->"]
    printed = iter(outputs or [])
    for kind, text in cells(program.read_text(encoding="utf-8")):
        if kind == "markdown":
            written.append(text)
        elif kind == "hidden":
            written.append(f"<!-- setup\n{text}\n-->")
            next(printed, "")
        else:
            written.append(f"```python\n{text}\n```")
            if output := next(printed, "").rstrip():
                note = "<!-- digits vary -->\n" if kind == "digits vary" else ""
                written.append(f"{note}```output\n{output}\n```")
    return "\n\n".join(written) + "\n"


def run(program: Path) -> list[str]:
    """What each cell of code prints, in one namespace, in an empty directory."""
    scope: dict[str, object] = {"__name__": "__page__"}
    outputs, before = [], Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            for kind, text in cells(program.read_text(encoding="utf-8")):
                if kind != "markdown":
                    printed = io.StringIO()
                    with contextlib.redirect_stdout(printed):
                        exec(compile(text, str(program), "exec"), scope)
                    outputs.append("\n".join(line.rstrip() for line in printed.getvalue().splitlines()))
        finally:
            os.chdir(before)
    return outputs


def main(names: list[str]) -> None:
    """Run the programs of these names, or all, and write their pages."""
    programs = [PROGRAMS / f"{name}.py" for name in names] or sorted(PROGRAMS.glob("*.py"))
    for program in programs:
        (PAGES / f"{program.stem}.md").write_text(page(program, run(program)), encoding="utf-8")
        print(program.stem)


if __name__ == "__main__":
    main(sys.argv[1:])
