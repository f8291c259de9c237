"""Probes: look into single calls of linear layers, and change what comes out of their GEMMs.

    def attach(module, index, weight, call):
        if module.layer == "fc1":
            call.probe = MyProbe()

    probe.install(attach)

Modules ask `attach` once for every call, before it runs. It may give the call a `Probe`, and other quantizers. Without
it, modules ask one global variable whether there is one, and calls whether they have a probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..planes import Plane

if TYPE_CHECKING:
    from .call import LinearCall

Attach = Callable[[Any, int, Tensor, "LinearCall"], None]
"""A function of the module, the index of its linear layer, the weight and the call."""


class Probe(Protocol):
    """What a call shows to somebody who looks into it. Operands are planes, or tensors in high precision."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        x_operands: tuple[Plane | Tensor, Plane | Tensor | None],
        weight_operands: tuple[Plane | Tensor, Plane | Tensor | None],
    ) -> None:
        """See x and W before fprop: as they were given, and what fprop multiplies and what is saved of them."""

    def backward(self, dy: Tensor, rows: Plane | Tensor | None, columns: Plane | Tensor | None) -> None:
        """See dy before dgrad, which multiplies ``rows``, and wgrad, which multiplies ``columns``."""

    def result(self, gemm: str, value: Tensor) -> Tensor:
        """See what a GEMM has computed, without padding; return what to use instead, or the same tensor."""

    def watches(self, gemm: str) -> bool:
        """Whether `result` does anything for a GEMM."""

    def modifies(self, gemm: str) -> bool:
        """Whether `result` may return other numbers."""


attach: Attach | None = None  # for all threads: backward may run in threads of autograd


def install(function: Attach) -> None:
    """Let modules ask a function for probes from now on.

    Raises:
        RuntimeError: there is another one already.
    """
    global attach
    if attach is not None and attach != function:
        raise RuntimeError("something else looks into linear layers already; only one can do so at a time")
    attach = function


def remove(function: Attach) -> None:
    """Undo `install`. Calls that have a probe keep it, so that their backward passes are seen."""
    global attach
    if attach == function:
        attach = None


def probed_gradient(
    compute: Callable[[torch.dtype, Tensor | None], Tensor], probe: Probe
) -> Callable[[torch.dtype, Tensor | None], Tensor]:
    """The function that computes dW, or adds it to a tensor, shown to a probe.

    A gradient that is added to ``main_grad`` is computed once more for a probe that only looks: adding it in another
    way could round differently.
    """

    def shown(dtype: torch.dtype, out: Tensor | None) -> Tensor:
        if not probe.watches("wgrad"):
            return compute(dtype, out)
        if out is None:
            return probe.result("wgrad", compute(dtype, None))
        if probe.modifies("wgrad"):
            return out.add_(probe.result("wgrad", compute(out.dtype, None)))
        made = compute(dtype, out)
        probe.result("wgrad", compute(out.dtype, None))
        return made

    return shown
