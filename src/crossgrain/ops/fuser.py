"""`OperationFuser`: runs a sequence of operations as one autograd function.

Forward and backward have separate lists of operations, in which neighbours may have been fused. Both lists consist of
the same basic operations, each of which has its own context. So operations that are fused in one pass need not be fused
in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..quantizers.base import Quantizer
from ..recipe import Recipe, active, backward_note, forward_step
from ..runtime.derivatives import differentiable_once, entrances
from ..runtime.torch_patches.compiler_marks import eager_only
from ..runtime.transforms import refuse_transforms
from .channels import Port, Wiring
from .context import OperationContext, SavedTensors
from .fusions import FusionFunction, apply_fusions
from .op import FusibleOperation, Kwargs

Placed = list[tuple[FusibleOperation, list[int]]]  # operations, and the positions of their basic operations


class OperationFuser:
    """Runs operations: ``OperationFuser(ops)(input, *extra_inputs)``.

    A call returns the output, or a tuple of the output and the extra outputs. The class attributes are the lists of
    fusions, in the order in which they are applied.

    Args:
        ops: the operations, in the order of forward.

    Examples:
        >>> fuser = cg.ops.OperationFuser([cg.ops.ReLU(), cg.ops.ConstantScale(2.0)])
        >>> fuser(torch.tensor([-1.0, 3.0]))
        tensor([0., 6.])
    """

    forward_backward_fusion_functions: ClassVar[list[FusionFunction]] = []
    forward_fusion_functions: ClassVar[list[FusionFunction]] = []
    backward_fusion_functions: ClassVar[list[FusionFunction]] = []

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        self._given_ops = list(ops)
        self._basic_ops = [basic for op in ops for basic in op.as_basic_ops()]
        self._forward_ops: Placed = [(op, [index]) for index, op in enumerate(self._basic_ops)]
        self._backward_ops: Placed = list(self._forward_ops)
        self._fused_for: Any = None
        self._ran_before = False

    @property
    def num_basic_ops(self) -> int:
        return len(self._basic_ops)

    @property
    def num_extra_inputs(self) -> int:
        """How many extra inputs the caller has to provide."""
        return Wiring(self._basic_ops).num_public_inputs

    @eager_only("crossgrain: fused operations are chosen anew in every call, and run in eager")
    def __call__(
        self, input: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Sequence[Kwargs] | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        kwargs = [{}] * self.num_basic_ops if basic_op_kwargs is None else list(basic_op_kwargs)
        if len(kwargs) != self.num_basic_ops:
            raise ValueError(
                f"basic_op_kwargs has keyword arguments for {len(kwargs)} operations, but there are "
                f"{self.num_basic_ops}"
            )
        refuse_transforms("a sequence of fusible operations")
        wiring = Wiring(self._basic_ops)
        extras = wiring.public_inputs(extra_inputs)
        if not self._ran_before:
            for given in self._given_ops:
                given.pre_first_fuser_forward()
            self._ran_before = True
        recipe = self._have_quantizers(input.device)
        with ExitStack() as steps:
            for op in self._basic_ops:
                if op._recipe is not None and "forward" in op._built.states:
                    steps.enter_context(forward_step(op._built.states["forward"]))
            return self._run(input, extra_inputs, extras, wiring, kwargs, recipe)

    def _run(
        self,
        input: Tensor,
        extra_inputs: Sequence[Tensor],
        extras: list[list[Tensor | None]],
        wiring: Wiring,
        kwargs: list[Kwargs],
        recipe: Recipe | None,
    ) -> Tensor | tuple[Tensor, ...]:
        first = self._first_op_requiring_backward(input, extras)
        for index, op in enumerate(self._basic_ops):
            op.pre_fuser_forward(requires_grad=index >= first)
        self.maybe_fuse_ops(recipe, first)
        run = _Run(self, wiring, kwargs, first, self._contexts(input, first), self._backward_ops)
        if first == self.num_basic_ops:
            outputs = run.forward(input, extras)
        else:
            parameters = [parameter for op in self._basic_ops for parameter in op.parameters()]
            outputs = _FuserFunction.apply(run, len(parameters), input, *parameters, *extra_inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _have_quantizers(self, device: torch.device) -> Recipe | None:
        recipes = [op._recipe_in_force() for op in self._basic_ops]
        for op, recipe in zip(self._basic_ops, recipes, strict=True):
            op._data_device = device
            op.reset_recipe_state(recipe=recipe)
            state = op._built.states.get("forward") if recipe is not None else None
            if state is not None and state.delayed is not None and active().step is None:
                raise RuntimeError(
                    f"{op.layer}: delayed scaling updates its scales at the end of an autocast, but no autocast is "
                    "active; run the operation inside crossgrain.autocast"
                )
        return recipes[0] if recipes else None

    def _first_op_requiring_backward(self, input: Tensor, extras: list[list[Tensor | None]]) -> int:
        if not torch.is_grad_enabled():
            return self.num_basic_ops
        if input.requires_grad:
            return 0
        for index, op in enumerate(self._basic_ops):
            tensors = [*op.parameters(), *(extra for extra in extras[index] if extra is not None)]
            if any(tensor.requires_grad for tensor in tensors):
                return index
        return self.num_basic_ops

    def _contexts(self, input: Tensor, first: int) -> list[OperationContext]:
        contexts = []
        for index in range(self.num_basic_ops):
            ctx = OperationContext()
            ctx.requires_grad = index >= first
            ctx.input_requires_grad = index > first or (index == first and input.requires_grad)
            if ctx.input_requires_grad and index > 0:
                ctx.grad_input_quantizer = _snapshot(self._basic_ops[index - 1].get_grad_output_quantizer())
            contexts.append(ctx)
        return contexts

    # ---- fusing --------------------------------------------------------------------------------

    def maybe_fuse_ops(self, recipe: Recipe | None, first_op_requiring_backward: int = 0) -> None:
        """Apply all fusions, unless the result of the last time is still valid."""
        functions = (
            tuple(self.forward_backward_fusion_functions),
            tuple(self.forward_fusion_functions),
            tuple(self.backward_fusion_functions),
        )
        wanted = (
            None if recipe is None else (type(recipe), dict(recipe.options())),
            first_op_requiring_backward,
            functions,
        )
        if self._fused_for == wanted:
            return
        both, forward, backward = functions
        # An operation without a backward pass cannot be part of a fused one.
        ops: list[FusibleOperation] = list(self._basic_ops)
        still, moving = ops[:first_op_requiring_backward], ops[first_op_requiring_backward:]
        together = apply_fusions(both, moving, recipe)
        self._forward_ops = self._placed(apply_fusions(forward, still + together, recipe))
        self._backward_ops = self._placed(still + apply_fusions(backward, together, recipe))
        self._fused_for = wanted

    def _placed(self, ops: list[FusibleOperation]) -> Placed:
        placed: Placed = []
        start = 0
        for op in ops:
            count = len(op.as_basic_ops())
            placed.append((op, list(range(start, start + count))))
            start += count
        return placed


def _snapshot(quantizer: Quantizer | None) -> Quantizer | None:
    """A copy with the present usages, which another forward pass may change before backward runs."""
    return None if quantizer is None else quantizer.copy()


@dataclass
class _Run:
    """One forward pass through the sequence, and its backward passes."""

    fuser: OperationFuser
    wiring: Wiring
    kwargs: list[Kwargs]
    first: int
    contexts: list[OperationContext]
    backward_ops: Placed
    saved: SavedTensors | None = None
    parameter_counts: list[int] = field(init=False)
    backward_notes: list[Callable[[], None]] = field(init=False)

    def __post_init__(self) -> None:
        ops = self.fuser._basic_ops
        self.parameter_counts = [sum(1 for _ in op.parameters()) for op in ops]
        states = [op._built.states.get("backward") for op in ops[self.first :] if op._recipe is not None]
        delayed = [state for state in states if state is not None and state.delayed is not None]
        self.backward_notes = [backward_note(state) for state in delayed]

    def forward(self, x: Tensor, extras: list[list[Tensor | None]]) -> tuple[Tensor, ...]:
        """Return the output and the extra outputs for the caller."""
        placed = self.fuser._forward_ops
        channels: dict[str, Tensor] = {}
        seen: list[Tensor] = []
        for position, (op, indices) in enumerate(placed):
            before = placed[position - 1][0] if position else None
            after = placed[position + 1][0] if position + 1 < len(placed) else None
            x, extra_outputs = op.fuser_forward(
                [self.contexts[i] for i in indices],
                x,
                basic_op_extra_inputs=[self._filled(i, extras[i], channels, indices) for i in indices],
                prev_op_grad_output_quantizer=None if before is None else before.get_grad_output_quantizer(),
                next_op_input_quantizer=None if after is None else after.get_input_quantizer(),
                basic_op_kwargs=[self.kwargs[i] for i in indices],
            )
            for index, outputs in zip(indices, extra_outputs, strict=True):
                ports = self.wiring.outputs[index]
                _check_count(op, "extra outputs", len(outputs), len(ports))
                returned: Sequence[Any] = outputs
                for number, (port, out) in enumerate(zip(ports, returned, strict=True)):
                    if out is None:
                        self.wiring.check_left_out(type(op).__name__, index, number, indices)
                        continue
                    if port.channel is not None:
                        channels[port.channel] = self._handed_over(out, index)
                    seen += [out] if port.public else []
        return (x, *seen)

    def _filled(
        self, index: int, given: list[Tensor | None], channels: dict[str, Tensor], indices: list[int]
    ) -> tuple[Any, ...]:
        """The extra inputs of an operation, from the caller or from channels; None for what passes inside of it."""
        ports = zip(self.wiring.inputs[index], given, strict=True)
        return tuple(
            extra if port.channel is None or self.wiring.passes_inside(port, indices) else channels[port.channel]
            for port, extra in ports
        )

    def _handed_over(self, tensor: Tensor, index: int) -> Tensor:
        """What readers of a channel get: a tensor that says whether it gets a gradient."""
        needs = index >= self.first and tensor.is_floating_point()
        return tensor.detach().requires_grad_() if needs and not tensor.requires_grad else tensor

    def backward(self, dy: Tensor, grad_extras: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the input, of all parameters and of the caller's extra inputs."""
        self._note_delayed_scaling()
        given = iter(grad_extras)
        public = [[next(given) if port.public else None for port in ports] for ports in self.wiring.outputs]
        channels: dict[str, Tensor] = {}
        grad_params: list[Sequence[Tensor | None]] = [[None] * count for count in self.parameter_counts]
        grad_inputs: list[Sequence[Tensor | None]] = [[None] * len(ports) for ports in self.wiring.inputs]
        dx: Tensor | None = dy
        for op, indices in reversed(self.backward_ops):
            if indices[-1] < self.first:
                dx = None
                break
            assert dx is not None
            dx, params, inputs = op.fuser_backward(
                [self.contexts[i] for i in indices],
                dx,
                basic_op_grad_extra_outputs=[_summed(self.wiring.outputs[i], public[i], channels) for i in indices],
            )
            for index, of_params, of_inputs in zip(indices, params, inputs, strict=True):
                _check_count(op, "parameter gradients", len(of_params), self.parameter_counts[index])
                _check_count(op, "extra-input gradients", len(of_inputs), len(self.wiring.inputs[index]))
                grad_params[index], grad_inputs[index] = of_params, of_inputs
                for port, grad in zip(self.wiring.inputs[index], of_inputs, strict=True):
                    inside = self.wiring.passes_inside(port, indices)
                    if port.channel is not None and grad is not None and not inside:
                        known = channels.get(port.channel)
                        channels[port.channel] = grad if known is None else known + grad
        of_caller = [
            grad
            for ports, grads in zip(self.wiring.inputs, grad_inputs, strict=True)
            for port, grad in zip(ports, grads, strict=True)
            if port.public
        ]
        return [dx, *(grad for grads in grad_params for grad in grads), *of_caller]

    def _note_delayed_scaling(self) -> None:
        """Notify all operations first, because the gradient of one may be quantized by the operation after it."""
        for note in self.backward_notes:
            note()


def _summed(ports: list[Port], given: list[Tensor | None], channels: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of an operation's extra outputs: from the caller, from readers of the channel, or their sum."""
    total: list[Tensor | None] = []
    for port, grad in zip(ports, given, strict=True):
        inner = channels.get(port.channel) if port.channel else None
        total.append(inner if grad is None else grad if inner is None else grad + inner)
    return tuple(total)


def _check_count(op: FusibleOperation, what: str, count: int, wanted: int) -> None:
    if count != wanted:
        raise RuntimeError(f"{type(op).__name__} returned {count} {what}, but {wanted} were expected")


class _FuserFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, num_parameters: int, x: Tensor, *tensors: Tensor) -> Any:
        extra_inputs = tensors[num_parameters:]
        outputs = run.forward(x, run.wiring.public_inputs(extra_inputs))
        run.saved = SavedTensors([c for c in run.contexts if c.requires_grad])
        ctx.save_for_backward(*run.saved.handed_over())
        ctx.run = run
        ctx.entrances = entrances(x, *tensors)
        ctx.needs = ctx.needs_input_grad[2:]
        outputs = _told_apart(outputs, (x, *tensors))
        ctx.mark_non_differentiable(*(out for out in outputs if not out.is_floating_point()))
        return outputs

    @staticmethod
    @differentiable_once("a sequence of fusible operations")
    def backward(ctx: Any, dy: Tensor, *grad_extras: Tensor | None) -> Any:
        run: _Run = ctx.run
        assert run.saved is not None
        run.saved.restore(ctx.saved_tensors)
        grads = run.backward(dy, grad_extras)
        run.saved.release()
        return None, None, *(grad if needed else None for grad, needed in zip(grads, ctx.needs, strict=True))


def _told_apart(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give an output that is also an input, or occurs twice, a new tensor object, as autograd needs."""
    known = {id(tensor) for tensor in inputs}
    apart = []
    for out in outputs:
        if id(out) in known:
            out = out.detach()
        known.add(id(out))
        apart.append(out)
    return tuple(apart)


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion for forward passes.

    Args:
        op_fusion_func: ``fn(ops, *, recipe) -> ops``, which replaces neighbouring operations by fused ones.
        prepend: apply it before all registered fusions instead of after them.

    Examples:
        >>> class Both(cg.ops.FusedOperation):
        ...     def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        ...         first, second = self.basic_ops
        ...         return input_ * (first.scale * second.scale), [(), ()]  # no extra outputs
        >>> def fuse(ops, *, recipe):
        ...     scales = len(ops) == 2 and all(isinstance(op, cg.ops.ConstantScale) for op in ops)
        ...     return [Both(ops)] if scales else ops
        >>> cg.ops.register_forward_fusion(fuse)
        >>> cg.ops.Sequential(cg.ops.ConstantScale(2.0), cg.ops.ConstantScale(3.0))(torch.ones(1))
        tensor([6.])
    """
    _register(OperationFuser.forward_fusion_functions, op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion for backward passes; see `register_forward_fusion`.

    The function gets the operations in the order of forward here too.

    Examples:
        >>> class Both(cg.ops.FusedOperation):
        ...     def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        ...         first, second = self.basic_ops
        ...         return grad_output * (first.scale * second.scale), [[], []], [(), ()]
        >>> def fuse(ops, *, recipe):
        ...     scales = len(ops) == 2 and all(isinstance(op, cg.ops.ConstantScale) for op in ops)
        ...     return [Both(ops)] if scales else ops
        >>> cg.ops.register_backward_fusion(fuse)
        >>> x = torch.ones(1, requires_grad=True)
        >>> cg.ops.Sequential(cg.ops.ConstantScale(2.0), cg.ops.ConstantScale(3.0))(x).backward()
        >>> x.grad
        tensor([6.])
    """
    _register(OperationFuser.backward_fusion_functions, op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion for both passes; see `register_forward_fusion`.

    Its fused operations must define both passes. These fusions are applied before all others.

    Examples:
        >>> class Both(cg.ops.FusedOperation):
        ...     def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        ...         first, second = self.basic_ops
        ...         basic_op_ctxs[0].factor = first.scale * second.scale
        ...         return input_ * basic_op_ctxs[0].factor, [(), ()]
        ...
        ...     def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        ...         return grad_output * basic_op_ctxs[0].factor, [[], []], [(), ()]
        >>> def fuse(ops, *, recipe):
        ...     scales = len(ops) == 2 and all(isinstance(op, cg.ops.ConstantScale) for op in ops)
        ...     return [Both(ops)] if scales else ops
        >>> cg.ops.register_forward_backward_fusion(fuse)
        >>> x = torch.ones(1, requires_grad=True)
        >>> cg.ops.Sequential(cg.ops.ConstantScale(2.0), cg.ops.ConstantScale(3.0))(x).backward()
        >>> x.grad
        tensor([6.])
    """
    _register(OperationFuser.forward_backward_fusion_functions, op_fusion_func, prepend)


def _register(functions: list[FusionFunction], function: FusionFunction, prepend: bool) -> None:
    functions.insert(0 if prepend else len(functions), function)
