"""Public names have an example in their docstring, which runs, and functions say what their arguments are.

An example is expected of every function and class, tensors, storages and enumerations included. These need none:
exceptions, which nobody calls; data; deprecated names, whose docstring names another; and results ("The result of
`search`"), because the example of that function makes one.
"""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from types import ModuleType

import pytest
import torch

import crossgrain as cg
from crossgrain.formats import registry
from crossgrain.kernels.choice import using_backend
from crossgrain.ops import OperationFuser
from crossgrain.recipe import projections
from docs.tools.public_names import Name, public_names

from ..common.logs import silent

NAMES = {name.path: name for name in public_names() if not (name.is_data or isinstance(name.value, ModuleType))}
DEPRECATED = {name for name, each in NAMES.items() if "it is deprecated" in each.summary}


def documented(name: Name):
    """What has the docstring: the function inside decorators, the class of an object."""
    value = type(name.value) if name.path == "crossgrain.settings" else name.value
    return inspect.unwrap(value)


def needs_example(name: Name) -> bool:
    is_error = inspect.isclass(name.value) and issubclass(name.value, BaseException)
    return not is_error and name.path not in DEPRECATED and not is_result(name)


def is_result(name: Name) -> bool:
    """Whether its docstring says of which function with an example it is the result."""
    made_by = re.match(r"The result of `(\w+)`", name.summary)
    return made_by is not None and f"{name.path.rpartition('.')[0]}.{made_by[1]}" in WITH_EXAMPLE


def own_doc(name: Name) -> str:
    return inspect.cleandoc(documented(name).__doc__ or "")


WITH_EXAMPLE = [path for path, name in NAMES.items() if ">>> " in own_doc(name)]


def test_which_names_are_deprecated():
    assert {"crossgrain.fp8_autocast", "crossgrain.fp8_model_init"} == DEPRECATED


@pytest.mark.parametrize("path", [path for path, name in NAMES.items() if needs_example(name)])
def test_a_name_has_an_example(path):
    assert path in WITH_EXAMPLE, f"the docstring of {path} has no line that begins with '>>>'"


@pytest.fixture
def as_after_import(monkeypatch):
    """Examples may register formats, layers and fusions. No kernel is compiled; a GPU has no say in the results."""
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    monkeypatch.setattr(projections, "_by_type", dict(projections._by_type))
    for kind in ("forward", "backward", "forward_backward"):
        name = f"{kind}_fusion_functions"
        monkeypatch.setattr(OperationFuser, name, list(getattr(OperationFuser, name)))
    with using_backend("reference"), cg.settings.override(compute_capability=(10, 0)), silent():
        yield
    if torch.distributed.is_initialized():  # the example failed before its last line
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("path", WITH_EXAMPLE)
def test_an_example_gives_what_it_shows(path, as_after_import):
    value = documented(NAMES[path])
    names = {**vars(sys.modules[value.__module__]), "torch": torch, "cg": cg}
    example = doctest.DocTestParser().get_doctest(own_doc(NAMES[path]), names, path, inspect.getsourcefile(value), 0)
    told: list[str] = []
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(verbose=False, optionflags=options).run(example, out=told.append)
    assert not told, "".join(told)


@pytest.mark.parametrize(
    "path",
    [
        path
        for path, name in NAMES.items()
        if path.count(".") == 1 and path not in DEPRECATED and inspect.isfunction(documented(name))
    ],
)
def test_a_function_says_what_each_of_its_arguments_is(path):
    arguments = own_doc(NAMES[path]).partition("Args:\n")[2].partition("\n\n")[0]
    described = {line.strip().partition(":")[0].lstrip("*") for line in arguments.splitlines()}
    missing = inspect.signature(documented(NAMES[path])).parameters.keys() - described
    assert not missing, f"{path} does not say what these are: {', '.join(sorted(missing))}"
