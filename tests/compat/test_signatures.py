"""The signatures of all names of Transformer Engine that clients call, against what crossgrain offers under them.

`signatures.txt` has one line for each class, function and method: its name below ``transformer_engine``, its
parameters and defaults (``...`` is a default that is not compared). `signature_differences.txt` has all that differs
here, and why: a reason after ``#``, and below it lines ``name: problem, problem``. A problem that is not listed fails,
and so does a listed name that has none any more. ``*`` stands for any problem.
"""

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import crossgrain as cg
from crossgrain import compat

ROOT = compat.transformer_engine
_HERE = Path(__file__).parent
_VALUES = {"torch": torch, "DType": cg.DType} | {
    name: getattr(ROOT.common.recipe, name) for name in ("Format", "MMParams", "QParams")
}


class Parameters(NamedTuple):
    positional: dict[str, Any]
    keyword: dict[str, Any]
    any_positional: bool
    any_keyword: bool


def reference(line: str) -> tuple[str, Parameters]:
    """The name and the parameters of a line of the table."""
    name, _, rest = line.partition("(")
    (function,) = ast.parse(f"def f({rest}: pass").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    values = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
    values += [_value(default) for default in arguments.defaults]
    named = [_value(default) for default in arguments.kw_defaults]
    return name, Parameters(
        {argument.arg: value for argument, value in zip(arguments.args, values, strict=True)},
        {argument.arg: value for argument, value in zip(arguments.kwonlyargs, named, strict=True)},
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def _value(default: ast.expr | None) -> Any:
    return inspect.Parameter.empty if default is None else eval(ast.unparse(default), dict(_VALUES))


def offered(found: Any) -> Parameters | None:
    """The parameters of an object here; None if it is a method of torch, which tells none."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except ValueError:
        return None
    fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
    made = {field.name: field.default_factory for field in fields if field.default_factory is not dataclasses.MISSING}
    defaults = {p.name: made[p.name]() if p.name in made else p.default for p in parameters if p.name != "self"}
    kinds = {kind: [p.name for p in parameters if p.kind is kind] for kind in inspect._ParameterKind}
    positional = kinds[inspect.Parameter.POSITIONAL_ONLY] + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return Parameters(
        {name: defaults[name] for name in positional if name in defaults},
        {name: defaults[name] for name in kinds[inspect.Parameter.KEYWORD_ONLY]},
        bool(kinds[inspect.Parameter.VAR_POSITIONAL]),
        bool(kinds[inspect.Parameter.VAR_KEYWORD]),
    )


def problems(name: str, theirs: Parameters) -> list[str]:
    """What a caller would notice."""
    found: Any = ROOT
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return ["absent"]
    ours = offered(found)
    if ours is None:
        return []
    listed, known, places = [], ours.positional | ours.keyword, list(ours.positional)
    for place, (parameter, default) in enumerate((theirs.positional | theirs.keyword).items()):
        if parameter not in known:
            taken = ours.any_keyword or (ours.any_positional and parameter in theirs.positional)
            listed += [] if taken else [f"no {parameter}"]
            continue
        misplaced = parameter in theirs.positional and places[place : place + 1] != [parameter]
        if misplaced and not ours.any_positional:
            listed.append(f"position of {parameter}")
        if default is not inspect.Parameter.empty and default is not ... and known[parameter] != default:
            listed.append(f"default of {parameter}")
    extra = known.keys() - theirs.positional.keys() - theirs.keyword.keys()
    if not theirs.any_positional:
        listed += [f"needs {each}" for each in sorted(extra) if known[each] is inspect.Parameter.empty]
    return listed


def lines(file: str) -> list[str]:
    return (_HERE / file).read_text().splitlines()


def test_every_signature_is_that_of_transformer_engine_unless_a_reason_is_given():
    found = {name: problems(name, theirs) for name, theirs in map(reference, lines("signatures.txt"))}
    listed = dict(line.split(": ", 1) for line in lines("signature_differences.txt") if line and line[0] != "#")
    for name, each in found.items():
        known = listed.get(name, "").split(", ")
        new = [problem for problem in each if problem not in known and "*" not in known]
        assert not new, f"{name}: {', '.join(new)}: mend it, or give a reason in signature_differences.txt"
    gone = [name for name, known in listed.items() if not found[name] and known != "*"]
    assert not gone, "not different any more: remove them from the list"


def test_every_difference_has_a_reason():
    reason = None
    for line in lines("signature_differences.txt"):
        reason = line if line.startswith("# ") else reason if line else None
        assert not line or reason is not None, line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pytorch.Linear(in_features, out_features, no_such=None)", []),  # options for GPUs are taken and checked
        ("pytorch.Fp8Padding(align_size=None, num_gemms=None)", ["position of align_size", "position of num_gemms"]),
        ("pytorch.QuantizerRole(module_type='x', other=1)", ["default of module_type", "no other"]),
        ("pytorch.Float8Quantizer(scale, fp8_dtype)", ["position of fp8_dtype", "needs amax"]),
        ("pytorch.NoSuchName()", ["absent"]),
    ],
)
def test_differences_are_seen(line, expected):
    assert [each for each in problems(*reference(line)) if not each.startswith("default of num")] == expected
