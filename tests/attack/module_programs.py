"""Random programs over training runs: recipes, steps, checkpoints, copies, and writes from outside."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

import crossgrain as cg
from crossgrain import files

from .copy_plan import CopyPlan
from .module_formats import OVERRIDING, formats_of, recipe_of
from .module_model import LayerModel, OptimizerModel
from .module_world import LiveRuns, Run
from .tensor_model import ROW, TensorModel

MASTER = "master_param"


class Saved(NamedTuple):
    """The states of a run, stored in some way, and what they must hold."""

    how: str
    stored: Any
    layers: list[LayerModel]
    opt: OptimizerModel


class Modules(LiveRuns):
    """All actions."""

    weights: ClassVar = {"train": 8, "evaluate": 2, "save": 3, "load": 4}

    def __init__(self, seed: int) -> None:
        self.saved: dict[str, Saved] = {}
        super().__init__(seed)

    def do_step(self) -> None:
        """A step of the optimizer with whatever gradients there are."""
        self.take_step(*self.any())

    # ---- recipes ---------------------------------------------------------------------------------------------

    def do_convert(self) -> None:
        """Bind another recipe, or the same again, to a model; or give its layers back."""
        name, run = self.any()
        recipe = self.draw.choice([*self.theme, None])
        if run.style != "convert":
            return
        if recipe is None:
            self.note(f"unconvert({name})")
            cg.unconvert(run.net)
            assert all(type(layer) is nn.Linear for layer in run.net.children()), "a layer is not given back"
            for layer in run.layers:
                layer.built = layer.cache = None
        else:
            self.note(f"convert({name}, {recipe!r})")
            report = cg.convert(run.net, recipe_of(recipe))
            assert len(report.converted) + len(report.bound) == 3, f"not all layers were converted: {report}"
        run.recipe = recipe

    def do_requantize(self) -> None:
        """Weights that are kept quantized, in the formats of another recipe."""
        name, run = self.any()
        recipe = self.draw.choice(self.theme)
        if run.style != "kept" or recipe in OVERRIDING:
            return
        self.note(f"requantize_({name}, {recipe!r}, optimizer)")
        cg.requantize_(run.net, recipe_of(recipe), run.optimizer)
        for index, layer in enumerate(run.layers):
            twin = run.opt.twins.get(f"l{index}.weight")
            value = layer.preserved_value() if twin is None or twin.master is None else twin.master
            value = layer.plain("weight") if value is None else value
            assert isinstance(layer.weight, TensorModel)
            layer.weight, layer.writes = self._kept_weight(value, formats_of(recipe, index)), layer.writes + 1
            layer.weight.dtype = self.dtype
        run.recipe = recipe

    # ---- writing ---------------------------------------------------------------------------------------------

    def do_write(self) -> None:
        """Write a weight in place. A master that exists does not know of it, and wins in the next step."""
        name, run = self.any()
        index, how = self.draw.randrange(3), self.draw.choice(["copy_", "mul_", "data"])
        layer, parameter = run.layers[index], run.parameter(index, "weight")
        values = self.values(*layer.plain("weight").shape, deviation=0.2)
        if how == "mul_":
            values = layer.plain("weight").detach() * 0.5
        self.note(f"{name}.l{index}.weight.{how}")
        with torch.no_grad():
            if how == "mul_":
                parameter.mul_(0.5)
            elif how == "copy_":
                parameter.copy_(values)
            else:
                parameter.data = values.clone()
        layer.write("weight", values)

    def do_zero_grad(self) -> None:
        name, run = self.any()
        self.note(f"{name}.net.zero_grad()")
        run.net.zero_grad()
        run.forget_gradients()

    # ---- copies, checkpoints ---------------------------------------------------------------------------------

    def do_copy(self) -> None:
        """A copy of the model and its optimizer in one."""
        name, run = self.any()
        for layer in run.layers:
            if layer.preserved is not None and layer.preserved_value() is None:
                return
        net, optimizer = copy.deepcopy((run.net, run.optimizer))
        layers = [layer.copied() for layer in run.layers]
        made = self.keep(Run(run.style, run.recipe, net, optimizer, layers, run.opt.saved()))
        self.note(f"{made} = deepcopy({name})")

    def do_save(self) -> None:
        """Store the states of a run."""
        name, run = self.any()
        how = self.draw.choice(["state_dict", "torch.save", "checkpoint", "safetensors"])
        states = {"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict()}
        stored: Any = copy.deepcopy(states)
        if how == "torch.save":
            stored = io.BytesIO()
            torch.save(states, stored)
        elif how == "checkpoint":
            stored = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            files.save_checkpoint(stored, 1, model=run.net, optimizer=run.optimizer, recipe=None)
        elif how == "safetensors":
            stored = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "model.safetensors"
            files.save_safetensors(run.net, stored, recipe=None)
        saved = f"saved{self.step.number}"
        self.saved[saved] = Saved(how, stored, [layer.copied() for layer in run.layers], run.opt.saved())
        self.note(f"{saved} = {how} of {name}")

    def do_load(self) -> None:
        """Load states into a new run, or into one that is used: the model, the optimizer or both, in any order."""
        if not self.saved:
            return
        into_new = self.draw.random() < 0.4
        if into_new:
            self.do_new()
        name, run = (f"run{self.step.number}", self.runs[f"run{self.step.number}"]) if into_new else self.any()
        key = self.pick(self.saved)
        saved = self.saved[key]
        parts = self.draw.choice([["model", "optimizer"]] * 2 + [["optimizer", "model"], ["model"]])
        masters, requantize = self.draw.random() < 0.7, self.draw.random() < 0.3
        if saved.how == "safetensors":
            parts = ["model"]
        elif saved.how == "checkpoint":
            parts, masters = ["model", "optimizer"], True
        self.note(
            f"load {key} into {name}: {', '.join(parts)}" + ", requantize" * requantize + ", no masters" * (not masters)
        )
        plans = [self._plan(layer, other) for layer, other in zip(run.layers, saved.layers, strict=True)]
        rounded_twice = any(plan is not None and rounds_again(plan) for plan in plans)
        refusal = "a weight would be rounded a second time" if rounded_twice and not requantize else None
        done = self.attempt(lambda: self._load(run, saved, parts, masters, requantize), refusal)
        if not done:
            return
        for part in parts:
            if part == "model":
                for layer, other, plan in zip(run.layers, saved.layers, plans, strict=True):
                    self._loaded(layer, other, plan, whole=saved.how == "checkpoint")
            else:
                run.opt = saved.opt.saved(masters)

    def _plan(self, layer: LayerModel, other: LayerModel) -> CopyPlan | None:
        """How the bytes of a kept weight get into another; None if one of the two is plain."""
        if isinstance(layer.weight, TensorModel) and isinstance(other.weight, TensorModel):
            return CopyPlan(layer.weight, other.weight.clone())
        return None

    def _load(self, run: Run, saved: Saved, parts: list[str], masters: bool, requantize: bool) -> bool:
        if saved.how == "checkpoint":
            files.load_checkpoint(saved.stored, model=run.net, optimizer=run.optimizer, requantize=requantize)
            return True
        if saved.how == "safetensors":
            files.load_safetensors(saved.stored, run.net, requantize=requantize)
            return True
        if saved.how == "torch.save":
            saved.stored.seek(0)
            states = torch.load(saved.stored, weights_only=True)
        else:
            states = copy.deepcopy(saved.stored)
        if not masters:
            for state in states["optimizer"]["state"].values():
                state.pop(MASTER, None)
        # The model first: it may be refused, and what was loaded before would stay.
        for part in sorted(parts) if requantize else parts:
            if part == "model":
                files.load_state_dict(run.net, states["model"], requantize=requantize)
            else:
                run.optimizer.load_state_dict(states["optimizer"])
        return True

    def _loaded(self, layer: LayerModel, other: LayerModel, plan: CopyPlan | None, whole: bool) -> None:
        layer.cache = None
        if plan is not None:
            plan.carry_out()
            layer.writes += 1
        else:
            layer.write("weight", other.plain("weight"))
        if layer.bias is not None:
            layer.write("bias", other.plain("bias"))
        if not layer.kept:
            return
        if layer.preserved is not None and not other.kept:
            layer.preserved = (other.plain("weight"), layer.writes)
        kept = other.preserved_value() if whole and other.kept else None
        if kept is not None:
            layer.preserved = (kept, layer.writes)


def rounds_again(plan: CopyPlan) -> bool:
    """Whether numbers that were rounded before are rounded to a format; columns that are made from rows always are."""
    target, first = plan.target, plan.source.first()
    assert first is not None
    derives = target.derives and ROW in plan.source.planes
    again = [direction for direction in plan.rest if target.formats[direction].element]
    return bool(first.format.element) and any(direction == ROW or not derives for direction in again)
