"""Other devices than the current one, other streams than the default one, and compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

import crossgrain as cg

from ..gpu.fake_cuda.runs.recipes import RECIPES
from .finding import Finding

ROWS, WIDTH = 128, 256
ON_DEVICES = ("mxfp8", "nvfp4", "fp8", "fp8_delayed", "fp8_block", "hybrid")
COMPILED = ("mxfp8", "nvfp4", "hybrid")


def check_stream(recipe: str, device: torch.device) -> Finding:
    """A step on a stream of its own gives the bits of one on the default stream."""
    expected = _step(recipe, device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with _on(stream):
        results = _step(recipe, device)
    return _compared(results, expected, f"the stream {stream}")


def check_device(recipe: str, device: torch.device, current: torch.device) -> Finding:
    """A step on a device that is not the current one gives the bits of one on the current one."""
    expected = _step(recipe, current)
    with torch.cuda.device(current) if current.type == "cuda" else nullcontext():
        results = _step(recipe, device)
    found = _compared(results, expected, f"{device} while {current} is current")
    elsewhere = [name for name, result in results.items() if result.device != device]
    if elsewhere:
        found.problems.append(f"results that are not on {device}: {', '.join(elsewhere)}")
    return found


def check_compiled(recipe: str, device: torch.device, backend: str = "inductor") -> Finding:
    """A compiled layer gives the bits of one that is not."""
    expected = _step(recipe, device)
    results = _step(recipe, device, backend)
    return _compared(results, expected, f"torch.compile with {backend}")


def _step(recipe: str, device: torch.device, compiler: str | None = None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    layer = cg.Linear(WIDTH, 2 * WIDTH, params_dtype=torch.bfloat16).to(device)
    x = torch.randn(ROWS, WIDTH).to(torch.bfloat16).to(device).requires_grad_()
    call = layer if compiler is None else torch.compile(layer, backend=compiler, fullgraph=True)
    torch.manual_seed(2)
    with cg.autocast(recipe=RECIPES[recipe]()):
        y = call(x)
    y.backward(torch.ones_like(y) / 8)
    found = {"y": y.detach(), "dx": x.grad, "dW": layer.weight.grad}
    return {name: result for name, result in found.items() if result is not None}


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else _AfterTheCurrent(stream)


class _AfterTheCurrent(AbstractContextManager[None]):
    """A context manager for a stream that begins after the current one, which goes on after it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._outer = stream, torch.cuda.current_stream(stream.device)
        self._inside = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(self._outer)
        self._inside.__enter__()

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(*error)
        self._outer.wait_stream(self._stream)


def _compared(results: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> Finding:
    differing = list(_differing(results, expected))
    found = Finding({"compared": len(expected), "differing": differing})
    if differing or len(expected) != 3 or results.keys() != expected.keys():
        found.problems.append(f"{where}: other results, {', '.join(differing) or 'or other names'}")
    return found


def _differing(results: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[str]:
    for name, result in expected.items():
        if name in results and not torch.equal(results[name].cpu(), result.cpu()):
            yield name
