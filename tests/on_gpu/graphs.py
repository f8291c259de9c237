"""A training step in a CUDA graph. Nobody has promised that this works: it is only reported."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.runtime.logs import withheld

from ..gpu.fake_cuda.runs.recipes import RECIPES
from .finding import Finding

ROWS, WIDTH = 128, 256
STOCHASTIC = ("nvfp4", "hybrid")


class _Step:
    """Forward and backward of a layer with buffers that stay where they are."""

    def __init__(self, recipe: str, device: torch.device) -> None:
        torch.manual_seed(1)
        self._recipe = RECIPES[recipe]()
        self.layer = cg.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16).to(device)
        self.x = torch.randn(ROWS, WIDTH).to(torch.bfloat16).to(device).requires_grad_()
        self.gradient = torch.randn(ROWS, WIDTH).to(torch.bfloat16).to(device)

    def run(self) -> None:
        """One step. Gradients are set anew."""
        with cg.autocast(recipe=self._recipe):
            y = self.layer(self.x)
        dx, dw = torch.autograd.grad(y, (self.x, self.layer.weight), self.gradient)
        self.results = {"y": y.detach(), "dx": dx, "dW": dw}

    def copies(self) -> dict[str, Tensor]:
        """Copies of the results."""
        return {name: result.clone() for name, result in self.results.items()}


def check_graph(recipe: str, device: torch.device) -> Finding:
    """Capture a step, replay it twice, and compare it with eager: equal, unless it rounds stochastically."""
    step, found = _Step(recipe, device), Finding()
    with withheld() as ours, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        eager = _warmed_up(step, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run()
        replays = []
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize(device)
            replays.append(step.copies())
    found.numbers["warnings"] = sorted({text[:200] for text in (*ours, *(str(each.message) for each in told))})
    found.numbers["differs_from_eager"] = _differing(replays[0], eager)
    found.numbers["replays_differ"] = _differing(replays[0], replays[1])
    if recipe in STOCHASTIC:
        if not found.numbers["replays_differ"]:
            found.problems.append("every replay rounds with the same random numbers")
    elif found.numbers["differs_from_eager"] or found.numbers["replays_differ"]:
        found.problems.append("a replay gives other results than eager")
    return found


def _warmed_up(step: _Step, device: torch.device) -> dict[str, Tensor]:
    """The results of a step after kernels were compiled, on a stream of its own, as capturing wants it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            step.run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    return step.copies()


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, result in one.items() if not torch.equal(result, other[name])]
