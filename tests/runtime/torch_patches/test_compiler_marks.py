"""The marks are those that torch sets itself; that compiled modules heed them is in tests/nn/test_compiled.py."""

from __future__ import annotations

import torch

from crossgrain.runtime.torch_patches.compiler_marks import constant_in_graphs, eager_only


def marks(function):
    return {name: value for name, value in vars(function).items() if "dynamo" in name and not callable(value)}


def test_constants_are_marked_as_torch_marks_them():
    theirs = torch.compiler.assume_constant_result(lambda: 1)
    assert marks(constant_in_graphs(lambda: 1)) == marks(theirs) != {}


def test_functions_for_eager_are_marked_as_torch_marks_them():
    theirs, mine = torch.compiler.disable(lambda: 1, reason="why"), eager_only("why")(lambda: 1)
    assert marks(mine).items() <= marks(theirs).items()
    assert marks(mine)["_torchdynamo_disable"] is True
    assert marks(mine)["_torchdynamo_disable_msg"] == "why"


def test_they_run_as_they_are():
    assert eager_only("why")(lambda a, *, b: a - b)(3, b=1) == 2
