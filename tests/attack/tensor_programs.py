"""Random programs over quantized tensors: writes through aliases, copies, usages, other threads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import crossgrain as cg

from . import transcription as tr
from .copy_plan import CopyPlan
from .tensor_model import COLUMN, DIRECTIONS, OTHER, ROW, TensorModel, columns_of_rows, derived
from .tensor_world import DTYPES, Live, LiveTensors, short


class Tensors(LiveTensors):
    """All actions."""

    weights: ClassVar = {"new": 3, "write": 6, "alias": 4, "cut": 3, "usage": 5, "copy_in": 4, "assign": 2}

    # ---- writing ---------------------------------------------------------------------------------------------

    def do_write(self) -> None:
        """An operation in place, on this thread or on another."""
        name, (tensor, model) = self.any()
        line, operation, reads = self._operation(model)
        elsewhere = self.draw.random() < 0.15
        self.note(f"{name}{line}" + "  # in another thread" * elsewhere)
        problem, perhaps = self._update_problem(model, reads)
        plain = None if problem else operation(model.decoded() if model.planes else torch.zeros(model.shape))

        def run() -> bool:
            in_thread(lambda: operation(tensor)) if elsewhere else operation(tensor)
            return True

        if self.attempt(run, problem, perhaps=perhaps):
            assert plain is not None
            model.write(plain)

    def _update_problem(self, model: TensorModel, reads: bool) -> tuple[str | None, bool]:
        problem = model.write_problem()
        if problem or not reads:
            return problem, False
        first = ROW if ROW in model.planes else COLUMN
        return model.read_problem([first])

    def _operation(self, model: TensorModel) -> tuple[str, Callable[[Any], Any], bool]:
        """How it reads, a function of a quantized or a plain tensor, and whether it needs the old numbers."""
        number = self.draw.choice([2.0, -0.5, 0.3, 1.0, 100.0])
        other = self.values(model.shape, self.draw.choice([model.dtype, model.dtype, torch.float32]))
        place = self.draw.randrange(model.shape[0])

        def set_item(t: Any) -> Any:
            t[place] = number
            return t

        def quantized(t: Any) -> Any:
            return t.quantize_(other) if isinstance(t, cg.QuantizedTensor) else other

        def copied(t: Any) -> Any:
            return t.copy_(other) if isinstance(t, cg.QuantizedTensor) else other

        operations: list[tuple[str, Callable[[Any], Any], bool]] = [
            (f".mul_({number})", lambda t: t.mul_(number), True),
            (f".add_({number})", lambda t: t.add_(number), True),
            (".add_(plain)", lambda t: t.add_(other), True),
            (".zero_()", lambda t: t.zero_(), True),
            (f".fill_({number})", lambda t: t.fill_(number), True),
            (".clamp_(-1, 1)", lambda t: t.clamp_(-1, 1), True),
            (f"[{place}] = {number}", set_item, True),
            (".quantize_(plain)", quantized, False),
            (".copy_(plain)", copied, False),
        ]
        return self.draw.choice(operations)

    def do_two_at_once(self) -> None:
        """Writes to two tensors that share nothing, in two threads at the same time."""
        first, second = self.any(), self.any()
        pair = [first, second]
        if np.shares_memory(first[1].model.truth, second[1].model.truth):
            return
        values = [self.values(live.model.shape, live.model.dtype) for _, live in pair]
        if any(live.model.write_problem() for _, live in pair):
            return
        self.note(f"{first[0]}.copy_(plain), {second[0]}.copy_(plain)  # in two threads")
        calls = [lambda live=live, x=x: live.tensor.copy_(x) for (_, live), x in zip(pair, values, strict=True)]
        in_thread(*calls)
        for (_, live), x in zip(pair, values, strict=True):
            live.model.write(x)

    def do_foreach(self) -> None:
        """One operation on a list of tensors: all of them or none."""
        first, second = self.any(), self.any()
        if np.shares_memory(first[1].model.truth, second[1].model.truth):
            return
        models = [first[1].model, second[1].model]
        problems = [self._update_problem(model, True) for model in models]
        problem = next((why for why, _ in problems if why), None)
        self.note(f"torch._foreach_mul_([{first[0]}, {second[0]}], 0.5)")
        plain = [] if problem else [model.decoded().mul_(0.5) for model in models]

        def run() -> bool:
            torch._foreach_mul_([first[1].tensor, second[1].tensor], 0.5)
            return True

        if self.attempt(run, problem, perhaps=any(open_ for _, open_ in problems)):
            for model, x in zip(models, plain, strict=True):
                model.write(x)

    def do_other_element(self) -> None:
        """Write with a quantizer of the same family whose codes mean something else."""
        name, (tensor, model) = self.any()
        row = model.formats[ROW]
        if model.hybrid or row.name not in ("fp8", "mxfp8") or model.cut or model.write_problem():
            return
        fmt = tr.FORMATS[f"{row.name}_e5m2"]
        x = self.values(model.shape, model.dtype)
        self.note(f"quantizer_for({fmt.name!r}).update_quantized(plain, {name})")
        cg.quantizer_for(fmt.name).update_quantized(x, tensor)
        own, model.formats = model.formats, dict.fromkeys(DIRECTIONS, fmt)
        model.write(x)
        model.formats = own  # later writes are made by its own quantizer

    # ---- copies between tensors ------------------------------------------------------------------------------

    def do_copy_in(self) -> None:
        """``a.copy_(b)`` of two quantized tensors: bytes where formats are equal."""
        name, (tensor, model) = self.any()
        fitting = [other for other, live in self.live.items() if live.model.shape == model.shape]
        source_name = self.pick(fitting)
        source_tensor, source = self.live[source_name]
        self.note(f"{name}.copy_({source_name})")
        plan = CopyPlan(model, source)

        def run() -> bool:
            tensor.copy_(source_tensor)
            return True

        if self.attempt(run, plan.problem, perhaps=plan.perhaps):
            plan.carry_out()

    # ---- usages ----------------------------------------------------------------------------------------------

    def do_usage(self) -> None:
        """Drop a direction, or ask for one."""
        name, (tensor, model) = self.any()
        asked = {direction: self.draw.choice([None, None, False, True]) for direction in DIRECTIONS}
        self.note(f"{name}.update_usage({asked[ROW]}, {asked[COLUMN]})")
        problem, perhaps = self._usage_problem(model, asked)

        def run() -> bool:
            tensor.update_usage(asked[ROW], asked[COLUMN])
            return True

        if not self.attempt(run, problem, perhaps=perhaps):
            return
        if model.one_buffer:
            kept = [model.planes and asked[direction] is not False for direction in DIRECTIONS]
            if model.formats[ROW].element and not any(kept):
                model.planes.clear()
            return
        making = columns_of_rows if model.derives else derived
        made = {d: making(model, d) for d, want in asked.items() if want and d not in model.planes}
        for direction, want in asked.items():
            if want is False:
                model.planes.pop(direction, None)
        model.planes |= made

    def _columns_problem(self, model: TensorModel) -> tuple[str | None, bool]:
        """Why columns that are made from rows by definition cannot be made now."""
        if len(model.shape) < 2 and model.formats[COLUMN].block is not None:
            return "a flat tensor has no columns", False
        problem = model.shape_problem(model.matrix, [COLUMN])
        return (problem, False) if problem else model.read_problem([ROW])

    def _usage_problem(self, model: TensorModel, asked: dict[str, bool | None]) -> tuple[str | None, bool]:
        missing = [direction for direction, want in asked.items() if want and direction not in model.planes]
        if not missing:
            return None, False
        source = model.planes.get(OTHER[missing[0]])
        if model.derives and missing == [COLUMN] and source is not None:
            return self._columns_problem(model)
        if model.hybrid or source is None or not source.format.symmetric:
            return f"{missing[0]} codes cannot be made from what there is", False
        if source.format != model.formats[missing[0]]:
            return None, True  # it was written in another format, in which the other direction may be made or not
        return model.read_problem([OTHER[missing[0]]])

    # ---- tensors of their own --------------------------------------------------------------------------------

    def do_duplicate(self) -> None:
        """A copy, in one of the many ways to make one."""
        name, (tensor, model) = self.any()
        how = self.draw.choice(["clone", "deepcopy", "pickle", "save", "to"])
        dtype = self.draw.choice([other for other in DTYPES if other != model.dtype]) if how == "to" else None
        ways: dict[str, Callable[[], Any]] = {
            "clone": lambda: tensor.clone(),
            "deepcopy": lambda: copy.deepcopy(tensor),
            "pickle": lambda: pickle.loads(pickle.dumps(tensor)),
            "save": lambda: saved_and_loaded(tensor),
            "to": lambda: tensor.to(dtype),
        }
        self.note(f"t{self.step.number} = {how}({name}{'' if dtype is None else f', {short(dtype)}'})")
        problem, perhaps = model.read_problem(list(model.planes))
        made = self.attempt(ways[how], problem, perhaps=perhaps)
        if made is not None:
            self.keep(made, model.clone(dtype))

    def do_assign(self) -> None:
        """``a.data = b``: a plain tensor is quantized, a quantized one of the same class is shared."""
        name, (tensor, model) = self.any()
        if self.draw.random() < 0.4:
            other_name = self.pick(self.live)
            other = self.live[other_name]
            same = type(other.tensor) is type(tensor)
            self.note(f"{name}.data = {other_name}")
            done = self.attempt(lambda: set_data(tensor, other.tensor), None if same else "it is of another class")
            if done:
                self.live[name] = Live(tensor, other.model.alias())
            return
        dtype = self.draw.choice([model.dtype, *DTYPES])
        longer = self.draw.random() < 0.3
        shape = (model.shape[0] * 2, *model.shape[1:]) if longer and len(model.shape) > 1 else model.shape
        x = self.values(shape, dtype)
        self.note(f"{name}.data = plain of {list(shape)} {short(dtype)}")
        in_place = (shape, dtype) == (model.shape, model.dtype)
        problem = model.write_problem() if in_place else None if model.planes else "it has no planes"
        if not in_place and problem is None:
            blocks = any(plane.format.block for plane in model.planes.values())
            matrix = (int(np.prod(shape[:-1])), shape[-1])
            problem = (
                "it has one dimension"
                if blocks and len(shape) == 1
                else model.shape_problem(matrix, list(model.planes))
            )
        if self.attempt(lambda: set_data(tensor, x.clone()), problem):
            self._assigned(name, tensor, model, x, in_place)

    def _assigned(self, name: str, tensor: Any, model: TensorModel, x: Tensor, in_place: bool) -> None:
        if in_place:
            model.write(x)
            return
        usage = (ROW in model.planes, COLUMN in model.planes)
        new = self._modelled(tuple(x.shape), x.dtype, model.formats, usage, model.hybrid, model.derives)
        new.write(x)
        self.live[name] = Live(tensor, new)


def set_data(tensor: Any, value: Any) -> bool:
    tensor.data = value
    return True


def saved_and_loaded(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_thread(*calls: Callable[[], Any]) -> None:
    """Run each call in a thread of its own, at the same time; raise what one of them raised."""
    raised: list[Exception] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
