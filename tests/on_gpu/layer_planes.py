"""The planes of every operand of a training step, on a device and on the CPU, byte for byte.

The rounding of GEMMs must not enter: each layer gets on the device what it got on the CPU, its input and the gradient
of its output. What it quantizes is then the same, bit for bit, and so must be the planes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain.gpt.model import GPT, GPTConfig
from crossgrain.quantizers.observer import PlanesMade, observe

from .finding import Finding

CONFIG = GPTConfig(layers=2, width=128, heads=2, context=64)
PRESETS = ("mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd", "nvfp4-fwd-mxfp8-bwd", "fp8", "fp8-delayed", "fp8-block", "mxfp4")
_SEED = 20


@dataclass
class Call:
    """A call of a layer in a training step: its input, and the gradient of its output."""

    layer: nn.Module
    x: Tensor
    gradient: Tensor | None = None


@dataclass
class Made:
    """Planes that were made: of what, and their bytes.

    Attributes:
        what: the tensor and its format.
        source: the numbers that were quantized.
        buffers: the buffers by name.
    """

    what: str
    source: Tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)


def converted_gpt(preset: str) -> GPT:
    """A small GPT on the CPU, converted to a recipe."""
    torch.manual_seed(1)
    model = GPT(CONFIG)
    cg.convert(model, preset)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Random bytes, and those that follow them."""
    text = torch.randint(256, (2, CONFIG.context + 1), generator=torch.Generator().manual_seed(2))
    return text[:, :-1], text[:, 1:]


def check_planes(preset: str, device: torch.device) -> Finding:
    """Compare the planes of the first step of a small GPT."""
    model = converted_gpt(preset)
    found, compared, differing_sources = Finding(), 0, 0
    for name, call in _recorded_step(model).items():
        here, there = (_planes_of(call, on) for on in (torch.device("cpu"), device))
        if [made.what for made in here] != [made.what for made in there]:
            found.problems.append(f"{name}: the device has quantized other tensors than the CPU")
            continue
        for ours, expected in zip(there, here, strict=True):
            if not _same(ours.source, expected.source):
                differing_sources += 1
                continue
            compared += len(expected.buffers)
            found.problems += [
                f"{name}, {expected.what}: {_count(ours.buffers[buffer], tensor)} of {tensor.numel()} {buffer} differ"
                for buffer, tensor in expected.buffers.items()
                if not _same(ours.buffers[buffer], tensor)
            ]
    found.numbers = {"buffers_compared": compared, "sources_that_differ": differing_sources}
    if not compared:
        found.problems.append("no planes were compared")
    if differing_sources:
        found.problems.append(f"{differing_sources} tensors had other numbers before they were quantized")
    return found


def _recorded_step(model: GPT) -> dict[str, Call]:
    """Every quantized linear layer with what it gets in a step on the CPU."""
    calls: dict[str, Call] = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, cg.Linear):
            # The copy is made before the step, which changes the state of delayed scaling.
            handles.append(layer.register_forward_hook(_recorder(calls, name, copy.deepcopy(layer))))
    model.loss(*batch()).backward()
    for handle in handles:
        handle.remove()
    return calls


def _recorder(calls: dict[str, Call], name: str, untouched: nn.Module):  # type: ignore[no-untyped-def]
    def record(layer: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        call = calls[name] = Call(untouched, given[0].detach().clone())
        y.register_hook(lambda gradient: setattr(call, "gradient", gradient.detach().clone()))

    return record


def _planes_of(call: Call, device: torch.device) -> list[Made]:
    assert call.gradient is not None
    layer = copy.deepcopy(call.layer).to(device)
    x = call.x.to(device).requires_grad_()
    torch.manual_seed(_SEED)
    with _noted() as made:
        layer(x).backward(call.gradient.to(device))
    return made


@contextmanager
def _noted() -> Iterator[list[Made]]:
    """Context manager: the list gets copies of all planes that are made inside."""
    noted: list[Made] = []

    def note(event: PlanesMade) -> None:
        for made in event.made:
            plane, target = made.plane, made.target
            what = f"{event.tensor} {plane.direction.value} {plane.format.name}"
            given = {"codes": plane.operand_codes(), "amax": plane.amax, "measured amax": target.amax}
            if plane.scale is not None:
                given["scales"] = plane.operand_scales()
            buffers = {name: buffer.detach().cpu().clone() for name, buffer in given.items() if buffer is not None}
            noted.append(Made(what, event.source.cpu().clone(), buffers))

    with observe(note):
        yield noted


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and _count(a, b) == 0


def _count(a: Tensor, b: Tensor) -> int:
    """How many numbers differ in their bits."""
    if a.shape != b.shape:
        return b.numel()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
