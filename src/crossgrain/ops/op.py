"""The base classes of fusible operations.

A `BasicOperation` is one primitive: a GEMM, a bias, an activation. It defines forward and backward explicitly, without
autograd. So an `OperationFuser` can run a whole sequence of them as one autograd function, and can replace neighbouring
operations by a `FusedOperation` that does the work of several.

An operation may pass a quantized tensor to the next one. In forward it uses the input quantizer of the operation after
it; in backward it uses the grad-output quantizer of the operation before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..linear.call import activation_dtype
from ..nn.base import QuantizedModule
from ..nn.module_interface import SLOTS, Mode
from ..quantizers.base import Quantizer
from ..recipe import QuantizerRole, Recipe
from ..runtime.strict import refuse_if_strict
from .context import OperationContext

__all__ = [
    "BackwardResult",
    "BasicOperation",
    "ForwardResult",
    "FusedOperation",
    "FusibleOperation",
    "Gradients",
    "Kwargs",
    "activation_dtype",
]

Kwargs = Mapping[str, Any]
Gradients = Sequence[Tensor | None]
ForwardResult = tuple[Tensor, list[tuple[Tensor, ...]]]
BackwardResult = tuple[Tensor | None, list[Gradients], list[Gradients]]


class FusibleOperation(nn.Module):
    """Base class of all operations that can be part of a sequence which runs as one autograd function.

    Examples:
        >>> linear = cg.ops.Linear(32, 64)
        >>> isinstance(linear, cg.ops.FusibleOperation), [type(op).__name__ for op in linear.as_basic_ops()]
        (True, ['BasicLinear', 'Bias'])
    """

    @property
    def is_fused_op(self) -> bool:
        """Whether it does the work of several basic operations."""
        return isinstance(self, FusedOperation)

    def as_basic_ops(self) -> list[BasicOperation]:
        """The basic operations that it consists of, in the order of forward."""
        raise NotImplementedError

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer of the input; None if the operation needs its input in high precision."""
        return None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer of the output gradient; None if the operation needs it in high precision."""
        return None

    def pre_first_fuser_forward(self) -> None:
        """Called once, before the first forward."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before each forward, before any operation of the sequence runs."""

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[Kwargs],
    ) -> ForwardResult:
        """Run forward. Return the output, and the extra outputs of each basic operation."""
        raise NotImplementedError(
            f"{type(self).__name__} has no forward pass of its own; it replaces operations only in backward"
        )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> BackwardResult:
        """Run backward. Return the gradient of the input, and of each basic operation's parameters and extra inputs."""
        raise NotImplementedError(
            f"{type(self).__name__} has no backward pass of its own; it replaces operations only in forward"
        )

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Run the operation alone.

        Args:
            input: the input.
            *extra_inputs: extra inputs, if the operation has any.
            **kwargs: keyword arguments of its first basic operation.
        """
        from .fuser import OperationFuser  # fusers are made of operations

        fuser = OperationFuser([self])
        return fuser(input, *extra_inputs, basic_op_kwargs=[kwargs] + [{}] * (fuser.num_basic_ops - 1))


class BasicOperation(QuantizedModule, FusibleOperation):
    """Base class of single operations.

    A subclass defines `op_forward` and `op_backward`. If it has extra inputs or outputs, it defines `fuser_forward` and
    `fuser_backward` instead.

    Examples:
        >>> class Square(cg.ops.BasicOperation):
        ...     def op_forward(self, ctx, input_, **kwargs):
        ...         ctx.save_for_backward(input_)
        ...         return input_ * input_
        ...
        ...     def op_backward(self, ctx, grad_output):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * grad_output, []  # the gradients of the input and of the parameters
        >>> cg.ops.Sequential(Square(), cg.ops.ReLU())(torch.tensor([3.0]))
        tensor([9.])
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _module_type: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._recipe: Recipe | None = None
        self._extra_input_channels: dict[int, str] = {}
        self._in_sequence = False  # whether a Sequential has put it into a group
        self._extra_output_channels: dict[int, tuple[str, bool]] = {}

    def as_basic_ops(self) -> list[BasicOperation]:
        return [self]

    # ---- forward and backward ------------------------------------------------------------------

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> Tensor:
        """Run forward, for an operation without extra inputs and outputs. Return the output."""
        raise NotImplementedError(f"{type(self).__name__} does not define op_forward")

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        """Run backward. Return the gradients of the input and of the parameters, in the order of ``parameters()``."""
        raise NotImplementedError(f"{type(self).__name__} does not define op_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[Kwargs],
    ) -> ForwardResult:
        self._refuse_extras()
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> BackwardResult:
        self._refuse_extras()
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]

    def _refuse_extras(self) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise NotImplementedError(
                f"{type(self).__name__} has extra inputs or outputs, so it must define fuser_forward and fuser_backward"
            )

    # ---- channels ------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, channel: str) -> None:
        """Take an extra input from an earlier operation of the sequence instead of from the caller.

        Args:
            index: index of the extra input.
            channel: name of the channel, which an earlier operation writes to.
        """
        self._check_channel("input", index, self.num_extra_inputs, channel)
        self._refuse_rebinding_if_strict(channel)
        self._extra_input_channels[index] = channel

    def set_extra_output_channel(self, index: int, channel: str, *, output_to_caller: bool = True) -> None:
        """Pass an extra output to later operations of the sequence.

        Args:
            index: index of the extra output.
            channel: name of the channel, which later operations read.
            output_to_caller: return the extra output to the caller too.
        """
        self._check_channel("output", index, self.num_extra_outputs, channel)
        self._refuse_rebinding_if_strict(channel)
        self._extra_output_channels[index] = (channel, output_to_caller)

    def _refuse_rebinding_if_strict(self, channel: str) -> None:
        if self._in_sequence:
            refuse_if_strict(
                "channels of a sequence in use",
                f"{type(self).__name__} cannot be connected to the channel {channel!r}, because its channels were "
                "captured by an OperationFuser",
            )

    def _check_channel(self, kind: str, index: int, count: int, channel: str) -> None:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"{type(self).__name__}: the index of an extra {kind} must be an int, got {index!r}")
        if not isinstance(channel, str):
            raise TypeError(f"{type(self).__name__}: the name of a channel must be a str, got {channel!r}")
        if not channel:
            raise ValueError(f"{type(self).__name__}: the name of a channel must not be empty")
        if not 0 <= index < count:
            raise ValueError(f"{type(self).__name__} has {count} extra {kind}s, so there is no index {index}")

    # ---- quantizers ----------------------------------------------------------------------------

    def num_quantizers(self, mode: Mode) -> int:
        """How many tensors the operation quantizes in the forward or backward pass."""
        return 0

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole | None]:  # type: ignore[override]
        """The role of each tensor that the operation quantizes."""
        return [None] * self.num_quantizers(mode)

    def get_quantizer(self, mode: Mode, index: int) -> Quantizer | None:
        """A quantizer of the current recipe; None without a recipe."""
        count = self.num_quantizers(mode)
        if not 0 <= index < count:
            raise ValueError(f"{type(self).__name__} has {count} {mode} quantizers, so there is no index {index}")
        if self._recipe is None:
            return None
        return self.quantizers[SLOTS[mode]][index]

    @property
    def _fp8_metas(self) -> dict[Mode, dict[str, Any] | None]:
        """``fp8_meta`` of each pass by itself, as Transformer Engine keeps it; None before the first recipe."""
        return {
            mode: {**self.fp8_meta} if slot in self.fp8_meta and self.num_quantizers(mode) else None
            for mode, slot in SLOTS.items()
        }

    @property
    def _quantizers(self) -> dict[Mode, list[Quantizer]]:
        return {mode: self.quantizers[slot] for mode, slot in SLOTS.items()}

    def get_input_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """Make the quantizers for ``recipe``, unless the present ones fit.

        A weight that is kept quantized keeps its bytes, and uses the new quantizer when it is written next.
        """
        if recipe is not None and any(self._slot_counts().values()):
            self._build_quantizers(recipe, backward=torch.is_grad_enabled())
        self._recipe = recipe
        self.fp8 = recipe is not None

    @property
    def _calibrates(self) -> bool:
        """Whether tensors are only measured, not quantized (calibration)."""
        return self._recipe is not None and self._only_calibrates()

    def _slot_counts(self) -> Mapping[Mode, int]:
        return {"forward": self.num_quantizers("forward"), "backward": self.num_quantizers("backward")}

    def _roles(self, mode: Mode) -> list[QuantizerRole | None]:
        return self.get_quantizer_roles(mode)

    def _gemm_operands(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> Sequence[Mapping[str, Quantizer]]:
        return []

    @property
    def weight_names(self) -> list[str]:
        return []


class FusedOperation(FusibleOperation):
    """Base class of operations that do the work of several basic operations, in forward, in backward or in both.

    Examples:
        >>> class Both(cg.ops.FusedOperation):  # `register_forward_fusion` puts it in the place of two scales
        ...     def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        ...         first, second = self.basic_ops
        ...         return input_ * (first.scale * second.scale), [(), ()]  # no extra outputs
        >>> Both([cg.ops.ConstantScale(2.0), cg.ops.ConstantScale(3.0)]).is_fused_op
        True
    """

    basic_ops: Sequence[BasicOperation]

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        if not basic_ops:
            raise ValueError(f"{type(self).__name__} needs at least one basic operation")
        self._hold(list(basic_ops))

    def _hold(self, basic_ops: list[BasicOperation]) -> None:
        self.basic_ops = nn.ModuleList(basic_ops)  # type: ignore[assignment]

    def as_basic_ops(self) -> list[BasicOperation]:
        return list(self.basic_ops)

    def get_input_quantizer(self) -> Quantizer | None:
        return self.basic_ops[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return self.basic_ops[-1].get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        for op in self.basic_ops:
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.basic_ops:
            op.pre_fuser_forward(requires_grad=requires_grad)
