"""The examples of docs/reference/ops.md do what the page says. That they run is tested with all other pages."""

import torch

from ..common.documentation import DOCS, run_page


def test_examples_do_what_the_page_says() -> None:
    names: dict = run_page(DOCS / "reference" / "ops.md")
    assert names["x"].grad is not None
    assert names["residual"](torch.randn(4, 64)).shape == (4, 64)
    x = torch.randn(3, requires_grad=True)
    names["Square"]()(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
