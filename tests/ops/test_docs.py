"""The examples of docs/reference/ops.md run as they are printed."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ops.md"


def test_examples_run() -> None:
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    assert names["x"].grad is not None
    assert names["residual"](torch.randn(4, 64)).shape == (4, 64)
    x = torch.randn(3, requires_grad=True)
    names["Square"]()(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
