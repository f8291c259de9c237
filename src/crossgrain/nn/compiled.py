"""Support for `torch.compile`: a linear layer becomes two custom operators, which the compiler does not look into.

The forward operator returns y and the buffers that backward reads; the backward operator returns the gradients. For
tracing, the compiler only needs the shapes of what they return. Quantizers and formats, which are not tensors, are kept
in a `Traced` object, to which a number in the graph refers. The compiler traces everything else that modules do.

A graph is made for the recipe that was active when it was traced. Running it under another recipe raises an error.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..linear import probe
from ..linear.call import LinearCall, Needs
from ..linear.function import forward, gradients
from ..linear.traced import empty_forward
from ..quantizers.hybrid import rounds_stochastically
from ..recipe import Recipe, active, this_pass
from ..runtime.torch_patches.checkpoint_frames import in_backward
from ..runtime.torch_patches.compiler_marks import constant_in_graphs, eager_only
from ..runtime.transforms import current_transform, dispatch_modes, get_tracing_state, refuse_transforms
from .forward_pass import ForwardPass, TracedPass

if TYPE_CHECKING:
    from .linear_module import LinearModule


class Traced:
    """A module in a compiled graph, and the recipe it was traced for. It may have several linear layers."""

    def __init__(self, layer: LinearModule, recipe: Recipe) -> None:
        self._layer = weakref.ref(layer)  # the graph holds the parameters, but not the layer
        self.recipe = recipe
        self.contexts: dict[Any, Context] = {}  # what backward needs beside tensors, by layer, sizes and needs

    @property
    def layer(self) -> LinearModule:
        layer = self._layer()
        if layer is None:
            raise RuntimeError("a compiled graph uses a layer that no longer exists; compile the model again")
        return layer

    def call(self, index: int, x: Tensor, weight: Tensor, dtype: torch.dtype) -> LinearCall:
        """Describe the call of linear layer ``index``."""
        built = self.layer._build_quantizers(self.recipe)
        with torch.enable_grad():  # operators run without; whether there is a backward pass is not for the call to say
            call = self.layer._linear_call(
                index, x, weight, ForwardPass(self.recipe, built, False, dtype, None, nullcontext())
            )
        if probe.attach is not None:
            probe.attach(self.layer, index, weight, call)
            if call.probe is not None:
                raise RuntimeError(
                    f"{self.layer.layer} is part of a compiled graph, in which nobody can look into it: compile the "
                    "model again"
                )
        return call


class Context:
    """A replacement for the context of an autograd function: ``save_for_backward``, ``saved_tensors``, attributes."""

    saved_tensors: Sequence[Tensor | None] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def without_tensors(self) -> Context:
        """A copy without tensors, which remembers which buffers were saved."""
        kept = Context()
        vars(kept).update(vars(self), weight=None, call=None)
        kept.saved_tensors = ()
        vars(kept)["present"] = [tensor is not None for tensor in self.saved_tensors]
        return kept

    def with_tensors(self, buffers: Sequence[Tensor], weight: Tensor, call: LinearCall) -> Context:
        full, rest = Context(), iter(buffers)
        vars(full).update(vars(self), weight=weight, call=call)
        full.saved_tensors = [next(rest) if there else None for there in vars(self)["present"]]
        return full


_traced: list[Traced] = []


def ticket(layer: LinearModule) -> int | None:
    """The number of a layer in the graph that is being traced; None if the layer computes in high precision."""
    recipe = layer._recipe_in_force()
    if recipe is None:
        return None
    layer._prepare(recipe)
    for number, traced in enumerate(_traced):
        if traced._layer() is layer and traced.recipe is recipe:
            return number
    _traced.append(Traced(layer, recipe))
    return len(_traced) - 1


@constant_in_graphs
def constant_ticket(layer: LinearModule) -> int | None:
    """`ticket`, evaluated once when a graph is traced."""
    return ticket(layer)


@torch.library.custom_op("crossgrain::linear", mutates_args=())
def linear_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: int,
    index: int,
    dtype: torch.dtype,
    dx: bool,
    dw: bool,
    db: bool,
) -> list[Tensor]:
    """Return y, and the buffers that backward needs."""
    traced = _traced[number]
    layer = traced.layer
    if layer._recipe_in_force() != traced.recipe:
        raise RuntimeError(
            f"{layer.layer} was compiled for the recipe '{traced.recipe}', but the current recipe is "
            f"'{layer._recipe_in_force()}': compile the model again, or enter the same autocast"
        )
    needs, context = Needs(dx, dw, db), Context()
    built = layer._prepare(traced.recipe)
    call = traced.call(index, x, weight, dtype)
    if in_backward() and not this_pass().recomputes:
        _refuse_other_bits(layer.layer, call)
    # Without an autocast the module's forward is a step of delayed scaling, which ends with its last layer.
    goes_on = any(needs) and active().step is None and index < len(built.details) - 1
    step = nullcontext() if goes_on else layer._step(traced.recipe, built)
    # Operators run without gradients, by which delayed scaling would take this for a validation.
    with torch.set_grad_enabled(any(needs)), step, torch.no_grad():
        y = forward(context, x, weight, bias, call, needs)
    return [y, *_kept(context, traced, index, needs, x, weight)]


def _refuse_other_bits(layer: str, call: LinearCall) -> None:
    """Raise if a compiled graph recomputes stochastic rounding in backward, where it would draw other numbers."""
    if any(quantizer is not None and rounds_stochastically(quantizer) for quantizer in (call.input, call.weight)):
        raise RuntimeError(
            f"{layer} rounds its input or weight stochastically and is recomputed in backward by a compiled graph, "
            "where it would round differently: put the checkpoint around the compiled function, not inside it"
        )


@linear_op.register_fake
def _linear_shapes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: int,
    index: int,
    dtype: torch.dtype,
    dx: bool,
    dw: bool,
    db: bool,
) -> list[Tensor]:
    traced, needs, context = _traced[number], Needs(dx, dw, db), Context()
    call = traced.call(index, x, weight, dtype)
    y = empty_forward(context, x, weight, call, needs)
    return [y, *(torch.empty_like(tensor) for tensor in context.saved_tensors if tensor is not None)]


def _kept(context: Context, traced: Traced, index: int, needs: Needs, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The buffers for backward. Those that are inputs are copied, because an operator must not return its inputs."""
    traced.contexts[index, tuple(x.shape), x.dtype, needs] = context.without_tensors()
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (x, weight)}
    return [
        tensor.clone() if tensor.untyped_storage().data_ptr() in inputs else tensor
        for tensor in context.saved_tensors
        if tensor is not None
    ]


@torch.library.custom_op("crossgrain::linear_backward", mutates_args=())
def linear_backward_op(
    dy: Tensor,
    buffers: list[Tensor],
    weight: Tensor,
    number: int,
    index: int,
    dtype: torch.dtype,
    x_shape: list[int],
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    dx: bool,
    dw: bool,
    db: bool,
) -> list[Tensor]:
    """Return those of dx, dW and db that are needed."""
    traced, needs = _traced[number], Needs(dx, dw, db)
    call = traced.call(index, dy, weight, dtype)
    context = traced.contexts[index, tuple(x_shape), x_dtype, needs].with_tensors(buffers, weight, call)
    found = gradients(context, dy)
    return [gradient.contiguous() for gradient in found if gradient is not None]


@linear_backward_op.register_fake
def _linear_backward_shapes(
    dy: Tensor,
    buffers: list[Tensor],
    weight: Tensor,
    number: int,
    index: int,
    dtype: torch.dtype,
    x_shape: list[int],
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    dx: bool,
    dw: bool,
    db: bool,
) -> list[Tensor]:
    found = []
    if dx:
        found.append(dy.new_empty(x_shape, dtype=x_dtype))
    if dw:
        found.append(dy.new_empty(weight.shape, dtype=weight.dtype))
    if db:
        found.append(dy.new_empty(weight.shape[:1], dtype=bias_dtype))
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, ctx.number, ctx.index, ctx.dtype, ctx.dx, ctx.dw, ctx.db = inputs
    ctx.save_for_backward(weight, *output[1:])
    ctx.x_shape, ctx.x_dtype = list(x.shape), x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    weight, *buffers = ctx.saved_tensors
    found = iter(
        linear_backward_op(
            grads[0],
            buffers,
            weight,
            ctx.number,
            ctx.index,
            ctx.dtype,
            ctx.x_shape,
            ctx.x_dtype,
            ctx.bias_dtype,
            ctx.dx,
            ctx.dw,
            ctx.db,
        )
    )
    dx, dw, db = (next(found) if needed else None for needed in (ctx.dx, ctx.dw, ctx.db))
    return dx, dw, db, *[None] * 6


linear_op.register_autograd(_backward, setup_context=_setup)


def traced_linear(x: Tensor, weight: Tensor, bias: Tensor | None, this: TracedPass, index: int) -> Tensor:
    """Call linear layer ``index`` of a module in a graph that is being traced."""
    if this.number is None:
        cast = None if bias is None else bias.to(this.dtype)
        return torch.nn.functional.linear(x.to(this.dtype), weight.to(this.dtype), cast)
    grad = torch.is_grad_enabled()
    result: Tensor = linear_op(
        x,
        weight,
        bias,
        this.number,
        index,
        this.dtype,
        grad and x.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )[0]
    return result


@constant_in_graphs
def constant_traceable(module: LinearModule) -> bool:
    """Whether a graph can contain the linear layers of a module, evaluated once when it is traced."""
    return module._traceable()


_OPERANDS = ("inp", "m_splits")


def compilable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for ``forward`` of a module: the compiler traces it if it can, else it calls it between two graphs.

    With ``fullgraph=True``, a forward that cannot be traced is an error of the compiler.
    """
    names = tuple(inspect.signature(forward).parameters)[1:]
    why = "layers with side effects, weights that are kept quantized, or custom quantizers run in eager mode"
    untraced = eager_only(f"crossgrain: {why}")(forward)

    @functools.wraps(forward)
    def traced_or_not(self: Any, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            given = {**dict(zip(names, arguments, strict=False)), **options}
            plain = all(value is None or value is False for name, value in given.items() if name not in _OPERANDS)
            if not plain or isinstance(given.get("m_splits"), Tensor) or not constant_traceable(self):
                return untraced(self, *arguments, **options)
        elif get_tracing_state() is not None or current_transform() is not None or dispatch_modes():
            refuse_transforms(self.layer)  # the three are asked here, because a call would be in every step
        return forward(self, *arguments, **options)

    return traced_or_not
