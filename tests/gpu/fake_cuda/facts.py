"""Facts about the device itself, and about what only a GPU can do. Each function returns what a test compares."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import crossgrain as cg
from crossgrain.formats.dtypes import DType
from crossgrain.kernels.reference.constants import constant
from crossgrain.linear import function
from crossgrain.nn.compiled import linear_op, ticket
from crossgrain.runtime.host_and_device import number_on, on_device, require, tell_later
from crossgrain.runtime.logs import withheld
from crossgrain.runtime.random_numbers import draw_seed, seed_for_device, seeds_for_device

from . import device
from .allowed import is_allowed
from .runs.common import DTYPE, OPTIONS, WIDTH, Results, numbers, trained
from .runs.recipes import RECIPES

_GPU = torch.device("cuda", 0)


def _waits_of(action: Callable[[], Any]) -> list[list[str]]:
    with device.watched() as waits:
        action()
    return [[wait.kind, wait.operator.removeprefix("aten::")] for wait in waits]


def _error_of(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def what_waits() -> dict[str, Any]:
    """Operations that make the host wait for a GPU, and their neighbours that do not."""
    x, index = torch.rand(4, 4, device="cuda"), torch.tensor([1, 0, 3, 2]).cuda()
    host, pinned = torch.rand(4, 4), torch.rand(4, 4).pin_memory()
    mask = x > 0.5
    actions: dict[str, Callable[[], Any]] = {
        "item": lambda: x[0, 0].item(),
        "bool": lambda: bool((x > 2).any()),
        "tolist": lambda: x.tolist(),
        "equal": lambda: torch.equal(x, x),
        "nonzero": lambda: mask.nonzero(),
        "nonzero_static": lambda: torch.nonzero_static(mask, size=4),
        "masked_select": lambda: x.masked_select(mask),
        "read by a mask": lambda: x[mask],
        "write by a mask": lambda: x.index_put((mask,), torch.ones(1, device="cuda")),
        "masked_fill": lambda: x.masked_fill(mask, 0.0),
        "read by an index": lambda: x[index],
        "read by an index of the host": lambda: x[torch.tensor([1, 0])],
        "unique": lambda: x.unique(),
        "bincount": lambda: index.bincount(),
        "repeat_interleave": lambda: index.repeat_interleave(index),
        "repeat_interleave of known size": lambda: index.repeat_interleave(index, output_size=6),
        "to the host": lambda: x.cpu(),
        "to pinned memory": lambda: pinned.copy_(x, non_blocking=True),
        "from the host": lambda: host.cuda(),
        "from the host, non_blocking": lambda: host.to("cuda", non_blocking=True),
        "from pinned memory": lambda: pinned.to("cuda"),
        "from pinned memory, non_blocking": lambda: pinned.to("cuda", non_blocking=True),
        "tensor": lambda: torch.tensor(1.0, device="cuda"),
        "full": lambda: torch.full((), 1.0, device="cuda"),
        "a scalar of the host": lambda: x * torch.tensor(2.0),
        "synchronize": lambda: torch.accelerator.synchronize(),
        "on_device": lambda: on_device([1, 2], _GPU),
        "number_on": lambda: number_on(torch.ones(1), _GPU),
        "require": lambda: require((x < 2).all(), "x is small", lambda: "x is large"),
    }
    return {name: _waits_of(action) for name, action in actions.items()}


def mixing_devices() -> dict[str, Any]:
    """What torch says about tensors of two devices."""
    x = torch.rand(4, 4, device="cuda")
    return {
        "sum": _error_of(lambda: x + torch.rand(4)),
        "product": _error_of(lambda: x @ torch.rand(4, 4)),
        "choice": _error_of(lambda: x.index_select(0, torch.tensor([1]))),
        "lists": _error_of(lambda: torch._foreach_add_([x], [torch.rand(4, 4)])),
    }


def a_read_in_a_layer() -> dict[str, Any]:
    """A layer with a deliberate host read, in forward and in backward."""
    model, x = cg.Linear(WIDTH, WIDTH, **OPTIONS).to("cuda"), numbers("cuda", 32, WIDTH)
    gemm = function.gemm

    def reading(*args: Any, **options: Any) -> Tensor:
        y = gemm(*args, **options)
        y.sum().item()
        return y

    with mock.patch.object(function, "gemm", reading), device.watched() as waits:
        trained(model, x, RECIPES["mxfp8"](), steps=1)
    return {"places": sorted({wait.place for wait in waits if wait.kind == "read"})}


def seeds() -> dict[str, Any]:
    """Seeds of stochastic rounding for kernels that take them by pointer."""
    seed = -(2**62) - 5
    with device.watched() as waits:
        usual = seed_for_device(seed, _GPU)
    with withheld() as told, device.capturing():
        first, again, other = (seed_for_device(each, _GPU) for each in (seed, seed, seed + 1))
        torch.manual_seed(3)
        drawn = draw_seed()
        of_first_graph = seed_for_device(drawn, _GPU)
        torch.manual_seed(3)
        of_second_graph = seed_for_device(draw_seed(), _GPU)
        table = constant((1.0, 2.5), torch.float32, _GPU)
    table_after = constant((1.0, 2.5), torch.float32, _GPU)
    after = seed_for_device(seed, _GPU)
    several = seeds_for_device([seed, 5], _GPU)
    return {
        "waits": len(waits),
        "usual": [str(usual.device), str(usual.dtype), list(usual.shape), usual.item() == seed],
        "captured": [first.item() == seed, again is first, other.item() == first.item()],
        "graphs_share": of_second_graph is of_first_graph,
        "tables": [table is table_after, constant((1.0, 2.5), torch.float32, _GPU) is table_after],
        "several": several.tolist() == [seed, 5],
        "after": after.item() == seed,
        "warnings": list(dict.fromkeys(told)),
    }


def flags() -> dict[str, Any]:
    """A flag on the device, and a quantizer whose statistics are still on the host."""
    quantizer = cg.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"))
    x, y = (torch.full((32, 32), number, device="cuda") for number in (1.0, 2.0))
    there = quantizer(x.cpu()).to("cuda")
    found = []
    for flag in (1, 0):
        there.quantize_(y, noop_flag=torch.full((1,), flag, device="cuda"))
        found.append(there.dequantize().cpu().unique().tolist())
    return {"found": found}


def checks() -> dict[str, Any]:
    """A check that the device does by itself, and a number that it tells later."""
    told: list[float] = []
    with device.watched() as waits:
        for number in (1.0, 2.0):
            tell_later(torch.full((), number, device="cuda"), told.append)
        before = list(told)
        tell_later(torch.full((), 3.0, device="cuda"), told.append)
    return {
        "error": _error_of(lambda: require(torch.zeros(1, device="cuda") > 0, "x > 0", lambda: "of the host")),
        "told": [before, told],
        "waits": len(waits),
    }


def scales_of_layers() -> dict[str, Any]:
    """The scales that a layer tells after a step on the device, and after the same on the CPU."""
    found = {}
    for name in ("fp8", "fp8_line", "fp8_delayed"):
        scales = []
        for on in ("cpu", "cuda"):
            torch.manual_seed(1)
            model = cg.Linear(WIDTH, WIDTH, **OPTIONS).to(on)
            trained(model, numbers(on, 32, WIDTH), RECIPES[name]())
            quantizers = [each for slots in model.quantizers.values() for each in slots]
            plain = [part for each in quantizers for part in each.plain_quantizers() if hasattr(part, "scale")]
            scales.append([[str(each.scale.device), each.scale.tolist()] for each in plain])
        found[name] = scales
    return found


def resumed_runs() -> dict[str, Any]:
    """What differs between a run on the device and one that was saved and loaded there, and where that one waits."""
    found = {}
    for capturable in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            model, optimizer, x = _begun(1, capturable)
            cg.files.save_checkpoint(directory, 1, model=model, optimizer=optimizer)
            other, its_optimizer, _ = _begun(2, capturable)
            cg.files.load_checkpoint(directory, model=other, optimizer=its_optimizer)
        results = []
        for each, own in ((model, optimizer), (other, its_optimizer)):
            each.zero_grad()
            x.grad = None
            with device.watched() as waits:
                results.append(trained(each, x, RECIPES["fp8_delayed"](), None, own))
        places = {wait.place for wait in waits if not is_allowed(wait)}
        found[f"capturable={capturable}"] = _differences(*results) + sorted(places)
    return found


def _begun(seed: int, capturable: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(seed)
    with cg.quantized_model_init(recipe=RECIPES["fp8_delayed"]()):
        model = cg.Linear(WIDTH, WIDTH, **OPTIONS).to("cuda")
    optimizer = cg.optim.FusedAdam(model.parameters(), master_weights=True, capturable=capturable)
    x = numbers("cuda", 32, WIDTH)
    trained(model, x, RECIPES["fp8_delayed"](), None, optimizer)
    return model, optimizer, x


def _differences(one: Results, other: Results) -> list[str]:
    return [name for name, each in one.items() if not torch.equal(each, other[name])]


def shapes_of_operators() -> dict[str, Any]:
    """What the custom operators return for fake tensors of the device, and what they return there in truth."""
    found = {}
    for name, recipe in RECIPES.items():
        model = cg.Linear(WIDTH, 2 * WIDTH, **OPTIONS).to("cuda")
        with cg.autocast(recipe=recipe()):
            number = ticket(model)
            call = partial(linear_op, number=number, index=0, dtype=DTYPE, dx=True, dw=True, db=True)
            tensors = [numbers("cuda", 32, WIDTH), model.weight, model.bias]
            real = call(*tensors)
            with FakeTensorMode() as mode:
                fake = call(*(mode.from_tensor(each) for each in tensors))
        found[name] = [[_description(each) for each in outputs] for outputs in (fake, real)]
    return found


def _description(tensor: Tensor) -> list[Any]:
    return [str(tensor.device), str(tensor.dtype), list(tensor.shape), list(tensor.stride())]


def compiled_models() -> dict[str, Any]:
    """Compiled modules on the device against the same in eager."""
    found = {}
    for name in ("mxfp8", "nvfp4", "fp8_delayed", "hybrid"):
        results = []
        for compiled in (False, True):
            torch.manual_seed(1)
            model, x = cg.Linear(WIDTH, 2 * WIDTH, **OPTIONS).to("cuda"), numbers("cuda", 32, WIDTH)
            call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            torch.manual_seed(2)
            results.append(trained(model, x, RECIPES[name](), lambda _, x, call=call: call(x)))
        found[name] = _differences(*results)
    return found


FACTS: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        what_waits,
        mixing_devices,
        a_read_in_a_layer,
        seeds,
        checks,
        flags,
        scales_of_layers,
        resumed_runs,
        shapes_of_operators,
        compiled_models,
    )
}
