"""The tree of modules: every name resolves, and every module is what it stands for."""

import importlib
import sys

import pytest

from crossgrain import compat
from crossgrain.compat.facade import Facade
from crossgrain.compat.tree import MODULES


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_name_of_the_tables_resolves(name):
    module = importlib.import_module(f"crossgrain.compat.{name}")
    assert module is MODULES[name] is sys.modules[f"crossgrain.compat.{name}"]
    if isinstance(module, Facade):
        for attribute in module.__all__:
            getattr(module, attribute)


def test_the_modules_are_attributes_of_each_other():
    for name, module in MODULES.items():
        at = compat
        for part in name.split("."):
            at = getattr(at, part)
        assert at is module
