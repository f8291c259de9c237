"""Activations whose output is multiplied by one number per row, as used for experts."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ...gemm.activations import Activation, activation, compute_dtype
from ...runtime.logs import warn
from ..computation import ComputationWithExtras
from ..context import OperationContext
from ..handover import plain
from ..op import Gradients, Kwargs, activation_dtype


class ScaledActivation(ComputationWithExtras):
    """``y = f(x) · scales`` for x [..., K]; ``scales`` [...] is an extra input.

    Args:
        activation_recompute_in_mlp: accepted for Transformer Engine; True warns that it saves no memory here.
        **options: arguments of the activation.
    """

    num_extra_inputs = 1
    activation_name: ClassVar[str]

    def __init__(self, activation_recompute_in_mlp: bool = False, **options: Any) -> None:
        super().__init__()
        size = options.get("interleave")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size <= 0):
            raise ValueError(f"{self.layer}: glu_interleave_size must be a positive int or None, got {size!r}")
        if activation_recompute_in_mlp:
            warn(
                __name__,
                f"{self.layer}: activation_recompute_in_mlp=True changes no result, but saves no memory here: the next "
                "operation keeps its input. To save memory, run the sequence in crossgrain.checkpoint.",
            )
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self._options = options

    @property
    def function(self) -> Activation:
        return activation(self.activation_name, **self._options)

    def _computed(
        self, ctx: OperationContext, input_: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (scales,) = extra_inputs
        x = plain(input_, activation_dtype(input_))
        if not scales.is_floating_point():
            raise TypeError(f"{self.layer}: the scales of the rows must be floating-point numbers, got {scales.dtype}")
        if scales.shape != x.shape[:-1]:
            raise ValueError(
                f"{self.layer}: an input of shape {list(x.shape)} needs a scale for each row, of shape "
                f"{list(x.shape[:-1])}, got {list(scales.shape)}"
            )
        if ctx.requires_grad:
            ctx.save_for_backward(x, scales)
            ctx.dtype = input_.dtype
        wide = self.function.forward(x.to(compute_dtype(x)))
        return (wide * scales.unsqueeze(-1).to(wide.dtype)).to(x.dtype), ()

    def _gradients(
        self, ctx: OperationContext, grad_output: Tensor, grad_extra_outputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Gradients, Gradients]:
        x, scales = ctx.saved_tensors
        wide = x.to(compute_dtype(x))
        dy = plain(grad_output).to(wide.dtype)
        dx = self.function.backward(dy * scales.unsqueeze(-1).to(wide.dtype), wide).to(ctx.dtype)
        d_scales = (dy * self.function.forward(wide)).sum(-1).to(scales.dtype)
        return dx, (), (d_scales,)


class ScaledSwiGLU(ScaledActivation):
    """``swiglu(x) · scales``

    Examples:
        >>> cg.ops.ScaledSwiGLU()(torch.ones(2, 4), torch.tensor([1.0, 0.5]))  # with a scale for each row
        tensor([[0.7311, 0.7311],
                [0.3655, 0.3655]])
    """

    activation_name = "swiglu"

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation_recompute_in_mlp, interleave=glu_interleave_size)
        self.glu_interleave_size = glu_interleave_size


class ScaledSReLU(ScaledActivation):
    """``max(x, 0)² · scales``

    Examples:
        >>> cg.ops.ScaledSReLU()(torch.full((2, 3), 2.0), torch.tensor([1.0, 0.5]))
        tensor([[4., 4., 4.],
                [2., 2., 2.]])
    """

    activation_name = "srelu"

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation_recompute_in_mlp)


class ScaledSiTUGLU(ScaledActivation):
    """``situglu(x) · scales``

    Examples:
        >>> cg.ops.ScaledSiTUGLU()(torch.ones(2, 4), torch.tensor([1.0, 0.5]))  # with a scale for each row
        tensor([[0.7158, 0.7158],
                [0.3579, 0.3579]])
    """

    activation_name = "situglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(activation_recompute_in_mlp, beta1=beta1, beta2=beta2, interleave=glu_interleave_size)
        self.glu_interleave_size = glu_interleave_size


class ScaledClampedQGeGLU(ScaledActivation):
    """``clamped_swiglu(x) · scales``

    Examples:
        >>> cg.ops.ScaledClampedQGeGLU()(torch.ones(2, 4), torch.tensor([1.0, 0.5]))  # with a scale for each row
        tensor([[1.6916, 1.6916],
                [0.8458, 0.8458]])
    """

    activation_name = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        super().__init__(
            activation_recompute_in_mlp,
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
            interleave=glu_interleave_size,
        )
        self.glu_interleave_size = glu_interleave_size
