"""Writes the pages of the reference that follow from the code: ``python -m docs.tools.reference``.

They are files in the repository, so that they can be read without a site; a test compares them with the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from crossgrain.cli.checkup.variables import KNOWN
from crossgrain.compat.environment import VARIABLES
from crossgrain_command.app import COMMANDS, app

from .public_names import GUIDES, INTEGRATIONS, PACKAGES, Name, public_names

DOCS = Path(__file__).parents[1]
_NOTE = "<!-- Written by `python -m docs.tools.reference`. -->\n\n"
_TRANSFORMER_ENGINE = ("crossgrain.compat.transformer_engine", "crossgrain.compat.transformer_engine_torch")


def pages() -> dict[Path, str]:
    """The text of each page by its path."""
    names = public_names()
    written = {
        DOCS / "reference" / "cli.md": _command_line(),
        DOCS / "reference" / "environment.md": _environment(),
        DOCS / "reference" / "api" / "index.md": _index(names),
    }
    for package, title in PACKAGES.items():
        written[DOCS / "reference" / "api" / f"{package}.md"] = _package(package, title, names)
    return {path: _NOTE + text for path, text in written.items()}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _index(names: list[Name]) -> str:
    lines = [
        "# All names",
        "",
        "Every public name, in the order of the alphabet. Names that are not here are internal, and may change in any",
        "version ([versions](../../project/versions.md)). `import crossgrain as cg` is enough for the packages, too:",
        "the large ones are imported when they are first used.",
        "",
        "Examples run as they stand after `import torch` and `import crossgrain as cg`.",
        "",
        "| name | |",
        "|---|---|",
    ]
    for name in sorted(names, key=lambda each: each.path.lower()):
        anchor = f"{name.page}.md#{name.source}"
        if name.path in _TRANSFORMER_ENGINE:
            anchor = "../../how-to/transformer_engine.md"
        lines.append(f"| [`{name.path}`]({anchor}) | {_cell(name.summary)} |")
    return "\n".join(lines) + "\n"


def _package(package: str, title: str, names: list[Name]) -> str:
    links = ", ".join(f"[{_title(page)}](../../{page}.md)" for page in GUIDES[package])
    parts = [f"# {title}\n", f"Explained, with examples: {links}.\n"]
    if package == "integrations":
        parts.append("One module for each training program, which needs that program to be installed.\n")
        parts += [_entry(f"crossgrain.integrations.{name}", f"crossgrain.integrations.{name}") for name in INTEGRATIONS]
    for name in sorted((each for each in names if each.page == package), key=lambda each: each.path.lower()):
        if name.path in _TRANSFORMER_ENGINE:
            text = "Transformer Engine's module of this name ([what it has](../../how-to/transformer_engine.md))."
            parts.append(f"## `{name.path}`\n\n{text}\n")
        elif name.is_data:
            parts.append(_data(name))
        else:
            parts.append(_entry(name.source, name.path))
    return "\n".join(parts)


def _title(page: str) -> str:
    """The first heading of a page."""
    lines = (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("# ") for line in lines if line.startswith("# "))


def _entry(source: str, heading: str) -> str:
    return f"::: {source}\n    options:\n      heading: {heading}\n"


def _data(name: Name) -> str:
    """A value: the keys of a mapping, or how it is written."""
    kind, value = type(name.value).__name__, name.value
    if isinstance(value, dict):
        said = f"A {kind} with the keys " + ", ".join(f"`{key}`" for key in value)
    elif isinstance(value, tuple):
        said = f"A {kind} of " + ", ".join(f"`{each.name}`" for each in value)
    else:
        said = f"`{value!r}`"
    return f"## {name.path} {{: #{name.source} }}\n\n{said}.\n"


def _commands() -> Iterator[tuple[str, Any]]:
    yield "crossgrain", typer.main.get_command(app)
    for commands in COMMANDS.values():
        for command in commands:
            yield f"crossgrain {command.name}", command.load()


def _overview() -> Iterator[str]:
    """A table of all commands by what they are for."""
    yield "| for | commands |"
    yield "|---|---|"
    for purpose, commands in COMMANDS.items():
        yield f"| {purpose} | {', '.join(f'[`{each.name}`](#crossgrain-{each.name})' for each in commands)} |"
    yield ""


def _command_line() -> str:
    parts = [
        "# The command line\n",
        "`pip install 'crossgrain[cli]'` installs the program `crossgrain`; `python -m crossgrain` is the same.\n",
        *_overview(),
        "The *small GPT* is a model that comes with crossgrain. It learns Python's documentation, which comes with",
        "Python, so these commands need neither a model nor data of yours.\n",
        "Options of a command stand after its name: `crossgrain train --recipe mxfp8`. Options of `crossgrain` itself",
        "stand before it: `crossgrain --debug train --recipe mxfp8`. Every command has `--help`, and `--json` for",
        "programs. `crossgrain --install-completion` teaches your shell to complete commands and options.\n",
        "Results go to stdout, errors and progress to stderr. The exit code says how a command ended:\n",
        "| exit code | |",
        "|---|---|",
        "| 0 | all is well |",
        "| 1 | something failed, or the answer is no: `doctor` has found a fault |",
        "| 2 | the command is wrong: an option, a recipe, a file that is not there |",
        "| 130 | Ctrl-C stopped it |\n",
    ]
    examples = {each.name: each.examples for group in COMMANDS.values() for each in group}
    for name, command in _commands():
        parts.append(f"## `{name}`\n")
        parts.append(" ".join((command.help or "").split("\n\n")[0].split()) + "\n")
        shown = examples.get(name.split()[-1], ())
        if shown:
            parts += ["<!-- not run: an example -->", "```bash", *shown, "```\n"]
        rows = [_option(each) for each in command.params if each.name != "help"]
        if rows:
            parts += ["| option | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
    if isinstance(parameter, typer.core.TyperArgument):
        names = f"`{(parameter.metavar or parameter.name or '').upper()}`"
    default = getattr(parameter.default, "value", parameter.default)  # a choice is an Enum
    if isinstance(default, list):
        default = ",".join(default)
    shown = "" if default in (None, "", False) or callable(default) else f"`{default}`"
    if parameter.required:
        shown = "required"
    return f"| {names} | {_cell(shown)} | {_cell(getattr(parameter, 'help', None) or '')} |"


def _environment() -> str:
    lines = [
        "# Environment variables",
        "",
        "`crossgrain doctor` lists those that are set, and what each of them does. Options of a process are",
        "[`crossgrain.settings`](api/runtime.md#crossgrain.runtime.settings.Settings).",
        "",
        "| variable | |",
        "|---|---|",
        *(f"| `{name}` | {_cell(effect)} |" for name, effect in KNOWN.items()),
        "",
        "## Of Transformer Engine",
        "",
        "They are read when an autocast under the names of Transformer Engine is entered, or when a recipe is created.",
        "Setting one that has no effect here to a value other than the one in brackets is warned about.",
        "",
        "| variable | |",
        "|---|---|",
    ]
    for variable in VARIABLES:
        neutral = (
            "" if variable.obeyed else f" (no effect; without a warning: {', '.join(map(repr, variable.neutral))})"
        )
        lines.append(f"| `{variable.name}` | {_cell(variable.here)}{neutral} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write all of them."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
