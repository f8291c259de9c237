"""Training runs with their models: how they are made, run and checked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import crossgrain as cg
from crossgrain.quantizers.nonfinite import NonfiniteError
from crossgrain.runtime import logs

from ..common.logs import logged
from . import transcription as tr
from .module_formats import (
    HP,
    OVERRIDING,
    RECIPES,
    LayerFormats,
    check_product,
    formats_of,
    operand,
    recipe_of,
)
from .module_model import OPTIMIZERS, LayerModel, OptimizerModel, weight_numbers
from .programs import World
from .tensor_checks import check_plane
from .tensor_model import COLUMN, DIRECTIONS, ROW, TensorModel
from .tensor_programs import in_thread
from .tensor_world import modelled

OTHER_RECIPE = "Recipe type changed"  # between classes of recipes
OLD_COPY = "was changed after its quantized copy was made"
RECOMPUTE: dict[str, Callable[..., Any]] = {
    "torch, reentrant": lambda f, x: torch_checkpoint(f, x, use_reentrant=True),
    "torch": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
    "crossgrain": lambda f, x: cg.checkpoint(f, x, use_reentrant=False),
}


class Tap(torch.autograd.Function):
    """Passes a tensor on, and notes it and its gradient. What is recomputed must be what it was before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: dict[str, Tensor], name: str) -> Tensor:
        ctx.notes, ctx.name = notes, name
        before = notes.setdefault(name, x.detach().clone())
        assert torch.allclose(before, x, rtol=0, atol=0, equal_nan=True), f"{name} is another when it is recomputed"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.notes[f"d{ctx.name}"] = grad.detach().clone()
        return grad, None, None


class Net(nn.Module):
    """Three linear layers, of which the last one may be left out."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.l0, self.l1, self.l2 = layers

    def forward(
        self, x: Tensor, used: int, first: bool | None, recompute: str | None, notes: list[dict[str, Tensor]]
    ) -> Tensor:
        def beginning(x: Tensor) -> Tensor:
            return self._call(1, self._call(0, x, first, notes), first, notes)

        x = beginning(x) if recompute is None else RECOMPUTE[recompute](beginning, x)
        return self._call(2, x, first, notes) if used == 3 else x

    def _call(self, index: int, x: Tensor, first: bool | None, notes: list[dict[str, Tensor]]) -> Tensor:
        layer = self.get_submodule(f"l{index}")
        options = {} if first is None or type(layer) is nn.Linear else {"is_first_microbatch": first}
        return Tap.apply(layer(Tap.apply(x, notes[index], "x"), **options), notes[index], "y")


class Run:
    """A model and its optimizer, with what is expected of both.

    Attributes:
        style: how the recipe gets to the layers: "convert", "autocast", or "kept" for weights that are kept quantized.
        recipe: the recipe; None for a model that is not converted.
    """

    def __init__(
        self, style: str, recipe: str | None, net: Any, optimizer: Any, layers: list[LayerModel], opt: OptimizerModel
    ) -> None:
        self.style, self.recipe, self.how = style, recipe, ""
        self.net, self.optimizer = net, optimizer
        self.layers, self.opt = layers, opt

    def parameter(self, index: int, name: str) -> Any:
        return getattr(self.net.get_submodule(f"l{index}"), name)

    def parameters(self) -> Iterator[tuple[int, str, LayerModel]]:
        for index, layer in enumerate(self.layers):
            for name in layer.parameters():
                yield index, name, layer

    def forget_copies(self) -> None:
        """Drop the quantized copies that microbatches share."""
        for index, layer in enumerate(self.layers):
            layer.built = layer.cache = None
            if type(self.net.get_submodule(f"l{index}")) is not nn.Linear:
                self.net.get_submodule(f"l{index}").clear_weight_cache()

    def forget_gradients(self) -> None:
        for layer in self.layers:
            layer.grads = dict.fromkeys(layer.grads)


class LiveRuns(World):
    """Training runs by name, and the actions that make and run them."""

    lengths = (3, 14)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.runs: dict[str, Run] = {}
        self.stack = ExitStack()
        self.dtype = self.draw.choice([torch.float32, torch.float32, torch.bfloat16])
        self.theme = self.draw.sample(sorted(RECIPES), 2)
        self.optimizer = self.draw.choice(sorted(OPTIMIZERS))
        # Sizes that are no multiples of blocks are padded, which weights that are kept quantized cannot be.
        self.sizes = self.draw.choice([(32, 64), (64, 32), (40, 72)])
        self.bias = self.draw.random() < 0.5
        one_buffer = self.draw.random() < 0.5
        self.one_buffer = one_buffer
        self.stack.enter_context(cg.settings.override(non_tn_fp8_gemm=one_buffer))
        self.note(f"settings.non_tn_fp8_gemm = {one_buffer}, sizes {self.sizes}, {self.dtype}, {self.optimizer}")
        self.do_new()

    def close(self) -> None:
        self.stack.close()

    # ---- making runs -----------------------------------------------------------------------------------------

    def values(self, *shape: int, deviation: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw.getrandbits(32))
        x = torch.randn(shape, generator=generator) * deviation * 2.0 ** self.draw.choice([0, 0, 0, -6, 4])
        if self.draw.random() < 0.3:
            x.view(-1)[: self.draw.choice([16, 128])] = 0
        elif self.draw.random() < 0.3:
            x.view(-1)[self.draw.randrange(x.numel())] = 50.0 * deviation
        return x.to(self.dtype)

    def do_new(self) -> None:
        """A new model with a new optimizer."""
        styles = ["convert", "autocast"]
        if self.sizes != (40, 72) and OPTIMIZERS[self.optimizer].masters:
            styles += ["kept", "kept"]
        style, recipe, preserve = self.draw.choice(styles), self.draw.choice(self.theme), self.draw.random() < 0.5
        if style == "kept" and recipe in OVERRIDING:
            recipe = "mxfp8"
        (d, h), layers, models = self.sizes, [], []
        for index, (columns, rows) in enumerate([(d, h), (h, d), (d, d)]):
            weight, bias = self.values(rows, columns, deviation=0.2), self.values(rows) if self.bias else None
            layers.append(self._layer(style, recipe, preserve, f"l{index}", weight, bias))
            kept = self._kept_weight(weight, formats_of(recipe, index)) if style == "kept" else weight
            preserved = (weight, 0) if preserve and isinstance(kept, TensorModel) else None
            models.append(LayerModel(kept, bias, preserved=preserved))
        net = Net(layers)
        if style == "convert":
            cg.convert(net, recipe_of(recipe))
        kind = OPTIMIZERS[self.optimizer]
        run = Run(style, recipe, net, kind.make(net.parameters()), models, OptimizerModel(kind))
        name = self.keep(run)
        self.note(f"{name} = {style} {recipe!r}" + ", initial values preserved" * (style == "kept" and preserve))

    def _layer(
        self, style: str, recipe: str, preserve: bool, name: str, weight: Tensor, bias: Tensor | None
    ) -> nn.Module:
        rows, columns = weight.shape
        context = nullcontext()
        if style == "convert":
            layer: nn.Module = nn.Linear(columns, rows, bias=bias is not None, dtype=self.dtype)
        else:
            if style == "kept":
                context = cg.quantized_model_init(recipe=recipe_of(recipe), preserve_high_precision_init_val=preserve)
            with context:
                layer = cg.Linear(
                    columns,
                    rows,
                    bias=bias is not None,
                    params_dtype=self.dtype,
                    init_method=lambda w: w.copy_(weight),
                    name=name,
                )
        with torch.no_grad():
            if style == "convert":
                layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
        return layer

    def _kept_weight(self, weight: Tensor, formats: LayerFormats) -> TensorModel:
        row, column = formats.w
        both = {ROW: tr.FORMATS[row], COLUMN: tr.FORMATS[column]}
        derives = "w" in formats.derived
        model = modelled(
            tuple(weight.shape), weight.dtype, both, (True, True), row != column or derives, derives, self.one_buffer
        )
        model.write(weight)
        return model

    def keep(self, run: Run) -> str:
        """Add a run under the name of the step; forget another one if there are too many."""
        name = f"run{self.step.number}" if self.step.number >= 0 else "run"
        self.runs[name] = run
        if len(self.runs) > 3:
            gone = self.pick(other for other in self.runs if other != name)
            del self.runs[gone]
            self.note(f"del {gone}")
        return name

    def any(self) -> tuple[str, Run]:
        name = self.pick(self.runs)
        return name, self.runs[name]

    # ---- running ---------------------------------------------------------------------------------------------

    def recipe_of_call(self, run: Run) -> tuple[str | None, Any, str]:
        """The recipe in force in a call, the context to enter, and how that reads."""
        recipe, context, how = self._recipe_of_call(run)
        if run.style == "convert" and how != run.how:
            run.forget_copies()  # a bound recipe may or may not be equal to the same recipe in an autocast
        run.how = how
        return recipe, context, how

    def _recipe_of_call(self, run: Run) -> tuple[str | None, Any, str]:
        other, chance = self.draw.choice(self.theme), self.draw.random()
        if run.style == "kept":
            return run.recipe, cg.autocast(recipe=recipe_of(run.recipe or "")), f"autocast({run.recipe!r})"
        if run.style == "autocast":
            return other, cg.autocast(recipe=recipe_of(other)), f"autocast({other!r})"
        if chance < 0.7 or run.recipe is None:
            return run.recipe, nullcontext(), "bound"
        if chance < 0.9:
            return other, cg.autocast(recipe=recipe_of(other)), f"autocast({other!r})"
        return None, cg.autocast(enabled=False), "autocast(enabled=False)"

    def do_train(self) -> None:
        """One or two microbatches, forward and backward, and perhaps a step of the optimizer."""
        name, run = self.any()
        for _ in range(self.draw.choice([1, 1, 2])):
            self._microbatch(name, run)
        if self.draw.random() < 0.6:
            self.take_step(name, run)

    def _microbatch(self, name: str, run: Run) -> None:
        x = self.values(self.draw.choice([8, 32, 33, 64]), self.sizes[0]).requires_grad_(self.draw.random() < 0.7)
        used = self.draw.choice([3, 3, 2])
        kinds = [None, None, *RECOMPUTE] if x.requires_grad else [None, None, "torch", "crossgrain"]
        recompute, first = self.draw.choice(kinds), self.draw.choice([None, None, None, True, True, False])
        dy = self.values(len(x), self.sizes[0], deviation=0.02)
        notes: list[dict[str, Tensor]] = [{}, {}, {}]

        def train() -> None:
            with context:
                y = run.net(x, used, first, recompute, notes)
            y.backward(dy)

        elsewhere = self.draw.random() < 0.15
        recipe, context, how = self.recipe_of_call(run)
        self.note(
            f"{name}(x{list(x.shape)}, {used} layers, first={first}, recompute={recompute}, dx={x.requires_grad}), "
            f"backward  # {how}" + ", in another thread" * elsewhere
        )
        with self._old_copies_warned(run, recipe, used, first, training=True) as weights:
            in_thread(train) if elsewhere else train()
        self.check_call(name, run, recipe, notes[:used], weights)
        self.check_gradients(name, run, recipe, notes[:used])

    def do_evaluate(self) -> None:
        """A forward pass without gradients."""
        name, run = self.any()
        x = self.values(self.draw.choice([8, 32, 40]), self.sizes[0])
        first = self.draw.choice([None, None, True, False])
        mode = self.draw.choice([torch.no_grad, torch.inference_mode])
        recipe, context, how = self.recipe_of_call(run)
        notes: list[dict[str, Tensor]] = [{}, {}, {}]
        self.note(f"with torch.{mode.__name__}(): {name}(x{list(x.shape)}, first={first})  # {how}")
        with self._old_copies_warned(run, recipe, 3, first, training=False) as weights, context, mode():
            run.net(x, 3, first, None, notes)
        self.check_call(name, run, recipe, notes, weights)

    @contextmanager
    def _old_copies_warned(
        self, run: Run, recipe: str | None, used: int, first: bool | None, training: bool
    ) -> Iterator[list[Any]]:
        """Around a call: yields the weights that it must use. It must warn of old copies, and of nothing else."""
        weights, old = [], 0
        for layer in run.layers[:used]:
            layer.run_with(recipe)
            columns = training and recipe not in OVERRIDING
            weight, is_old = layer.weight_of_call(None if recipe is None else first, columns)
            weights.append(weight)
            old += is_old
        logs.forget()  # each call warns of its old copies
        with logged() as records, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield weights
        messages = [str(record.args[0]) for record in records] + [str(warning.message) for warning in caught]
        warned = {message.split(":")[0] for message in messages if OLD_COPY in message}
        others = [message for message in messages if OLD_COPY not in message and OTHER_RECIPE not in message]
        assert not others, f"unexpected warnings: {others}"
        assert not [message for message in messages if OTHER_RECIPE in message and "GemmRecipe" in message]
        assert len(warned) == old, f"{len(warned)} layers warned that their copies are old, {old} are"

    def do_nonfinite(self) -> None:
        """An input with a NaN or an infinity, under each policy. Gradients are dropped after it."""
        name, run = self.any()
        x, dy = self.values(32, self.sizes[0]).requires_grad_(), self.values(32, self.sizes[0], deviation=0.02)
        with torch.no_grad():
            x.view(-1)[self.draw.randrange(x.numel())] = self.draw.choice([float("nan"), float("inf"), -float("inf")])
        policy = self.draw.choice(["propagate", "raise", "saturate"])
        recipe, context, how = self.recipe_of_call(run)
        notes: list[dict[str, Tensor]] = [{}, {}, {}]
        run.optimizer.zero_grad()
        run.forget_gradients()
        self.note(f"{name}(x with a number that is not finite), nonfinite={policy!r}, backward  # {how}")
        with self._old_copies_warned(run, recipe, 3, None, training=True) as weights:
            refusal = ""
            try:
                with cg.settings.override(nonfinite=policy):
                    with context:
                        y = run.net(x, 3, None, None, notes)
                    y.backward(dy)
            except NonfiniteError as error:
                refusal = str(error)
        if refusal:
            assert policy == "raise" and re.search("l[012]", refusal), refusal
            run.optimizer.zero_grad()
            run.forget_copies()  # which layers have begun with the recipe is open
            return
        self.check_call(name, run, recipe, notes, weights, marks=policy == "propagate")
        self.check_gradients(name, run, recipe, notes, marks=policy == "propagate")
        if policy == "raise":
            self._check_all_finite(recipe, notes)
        run.optimizer.zero_grad()
        run.forget_gradients()

    def _check_all_finite(self, recipe: str | None, notes: list[dict[str, Tensor]]) -> None:
        for index, seen in enumerate(notes):
            formats = HP if recipe is None else formats_of(recipe, index)
            for tensor, both in (("x", formats.x), ("dy", formats.dy)):
                quantized = any(tr.FORMATS[fmt].element for fmt in both)
                assert not quantized or seen[tensor].isfinite().all(), f"l{index}: {tensor} was quantized silently"

    # ---- checking calls --------------------------------------------------------------------------------------

    def check_call(
        self,
        name: str,
        run: Run,
        recipe: str | None,
        notes: list[dict[str, Tensor]],
        weights: list[Any],
        marks: bool = True,
    ) -> None:
        """y, and dx if there is one, of every layer."""
        for index, (seen, weight) in enumerate(zip(notes, weights, strict=True)):
            layer, formats = run.layers[index], HP if recipe is None else formats_of(recipe, index)
            x = operand(seen["x"], formats.x, "x" in formats.derived, False, marks)
            bias = None if layer.bias is None else layer.bias.float().numpy()
            w = weight_numbers(weight, formats, False, marks)
            check_product(f"{name}.l{index}: y", seen["y"], x, w.T, bias)
            if "dx" in seen:
                dy = operand(seen["dy"], formats.dy, "dy" in formats.derived, False, marks)
                # With this option, backward multiplies the weight itself, not a copy of it.
                itself = recipe is not None and recipe.endswith("backward_override: high_precision")
                w = weight_numbers(layer.weight if itself else weight, formats, True, marks)
                check_product(f"{name}.l{index}: dx", seen["dx"], dy, w)

    def check_gradients(
        self, name: str, run: Run, recipe: str | None, notes: list[dict[str, Tensor]], marks: bool = True
    ) -> None:
        """What backward has added to the gradients of every layer that ran."""
        for index, seen in enumerate(notes):
            layer, formats = run.layers[index], HP if recipe is None else formats_of(recipe, index)
            dy = operand(seen["dy"], formats.dy, "dy" in formats.derived, True, marks)
            x = operand(seen["x"], formats.x, "x" in formats.derived, True, marks)
            for parameter in layer.parameters():
                grad, before = run.parameter(index, parameter).grad, layer.grads[parameter]
                assert grad is not None, f"{name}.l{index}: no gradient of the {parameter}"
                added = None if before is None else before.float().numpy()
                what = f"{name}.l{index}: gradient of the {parameter}"
                if parameter == "weight":
                    check_product(what, grad, dy.T, x, added)
                else:
                    plain = seen["dy"].float().numpy()
                    check_product(what, grad[None], np.ones((1, len(plain)), np.float32), plain, added)
                layer.grads[parameter] = grad.clone()

    # ---- optimizer steps -------------------------------------------------------------------------------------

    def take_step(self, name: str, run: Run) -> None:
        self.note(f"{name}.optimizer.step()")
        run.optimizer.step()
        run.opt.step(run.layers)
        if self.draw.random() < 0.7:
            to_none = self.draw.random() < 0.8
            self.note(f"{name}.optimizer.zero_grad(set_to_none={to_none})")
            run.optimizer.zero_grad(set_to_none=to_none)
            for layer in run.layers:
                layer.grads = {
                    key: None if to_none or grad is None else torch.zeros_like(grad)
                    for key, grad in layer.grads.items()
                }

    # ---- checking everything ---------------------------------------------------------------------------------

    def check(self) -> None:
        for name, run in self.runs.items():
            for index, parameter, layer in run.parameters():
                what, found = f"{name}.l{index}.{parameter}", run.parameter(index, parameter)
                self._check_parameter(what, found, layer, parameter)
                check_same(f"gradient of {what}", found.grad, layer.grads[parameter])
                self._check_state(what, run, found, run.opt.twins.get(f"l{index}.{parameter}"))

    def _check_parameter(self, what: str, found: Any, layer: LayerModel, parameter: str) -> None:
        assert found.dtype == self.dtype, f"{what} is {found.dtype}"
        if parameter == "weight" and isinstance(layer.weight, TensorModel):
            assert isinstance(found, cg.QuantizedTensor), f"{what} is not kept quantized any more"
            for direction in DIRECTIONS:
                check_plane(f"{what}, {direction}", found.detach(), layer.weight, direction)
        else:
            check_same(what, found.detach(), layer.plain(parameter))

    def _check_state(self, what: str, run: Run, parameter: Any, twin: Any) -> None:
        state = run.optimizer.state.get(parameter, {})
        if twin is None:
            assert not state, f"{what}: the optimizer should have no state of it, but has {list(state)}"
            return
        if twin.master is not None:
            assert "master_param" in state, f"{what} has no master"
            check_same(f"master of {what}", state["master_param"], twin.master)
        for key, value in twin.moments.items():
            if isinstance(value, Tensor) and key != "step":
                assert key in state, f"{what}: the optimizer has lost {key}"
                check_same(f"{key} of {what}", state[key], value)


def check_same(what: str, found: Tensor | None, wanted: Tensor | None) -> None:
    assert (found is None) == (wanted is None), f"{what} is {'missing' if found is None else 'there'}"
    if found is not None and wanted is not None:
        assert found.shape == wanted.shape and found.dtype == wanted.dtype, f"{what} has shape {list(found.shape)}"
        assert torch.equal(found.detach(), wanted.detach()), f"{what} has other numbers"
