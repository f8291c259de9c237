"""Activations as operations. The formulas are in `crossgrain.gemm.activations`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ...formats.dtypes import DType
from ...gemm.activations import Activation, activation
from ...quantizers.float8 import Float8CurrentScalingQuantizer
from ..computation import Computation
from ..context import OperationContext
from ..handover import plain
from ..op import Gradients, activation_dtype


class ActivationOperation(Computation):
    """Base class of activations.

    Args:
        cache_quantized_input: keep the input for backward in FP8, which saves memory and rounds the gradient.
        **options: options of the activation function.
    """

    activation_name: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False, **options: Any) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input
        self._options = options

    @property
    def function(self) -> Activation:
        return activation(self.activation_name, **self._options)

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        return self.activation_forward(ctx, input_)

    def activation_forward(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """Return the output in high precision, and save the input for backward."""
        x = plain(input_, activation_dtype(input_))
        if ctx.requires_grad:
            ctx.dtype = input_.dtype
            ctx.save_for_backward(_in_fp8(x) if self.cache_quantized_input else x)
        return self.function.forward(x)

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return self.activation_backward(ctx, grad_output), []

    def activation_backward(self, ctx: OperationContext, grad_output: Tensor) -> Tensor:
        """Return the gradient of the input in high precision."""
        (x,) = ctx.saved_tensors
        return self.function.backward(plain(grad_output), plain(x)).to(ctx.dtype)


def _in_fp8(x: Tensor) -> Any:
    return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False).quantize(x.detach())


class GELU(ActivationOperation):
    """GELU in its tanh approximation.

    Examples:
        >>> cg.ops.GELU()(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
        tensor([-0.1588,  0.0000,  0.8412,  1.9546])
    """

    activation_name = "gelu"


class GEGLU(ActivationOperation):
    """``gelu(gate) · linear``, where gate and linear are the halves of the last dimension.

    Examples:
        >>> cg.ops.GEGLU()(torch.tensor([[1.0, 2.0, 0.5, 3.0]]))  # one half of the features gates the other
        tensor([[0.4206, 5.8638]])
    """

    activation_name = "geglu"


class GLU(ActivationOperation):
    """``sigmoid(gate) · linear``

    Examples:
        >>> cg.ops.GLU()(torch.tensor([[1.0, 2.0, 0.5, 3.0]]))  # one half of the features gates the other
        tensor([[0.3655, 2.6424]])
    """

    activation_name = "glu"


class QGELU(ActivationOperation):
    """``x · sigmoid(1.702 x)``

    Examples:
        >>> cg.ops.QGELU()(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
        tensor([-0.1542,  0.0000,  0.8458,  1.9357])
    """

    activation_name = "qgelu"


class QGEGLU(ActivationOperation):
    """``qgelu(gate) · linear``

    Examples:
        >>> cg.ops.QGEGLU()(torch.tensor([[1.0, 2.0, 0.5, 3.0]]))  # one half of the features gates the other
        tensor([[0.4229, 5.8070]])
    """

    activation_name = "qgeglu"


class ReLU(ActivationOperation):
    """``max(x, 0)``

    Examples:
        >>> cg.ops.ReLU()(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
        tensor([0., 0., 1., 2.])
    """

    activation_name = "relu"


class ReGLU(ActivationOperation):
    """``relu(gate) · linear``

    Examples:
        >>> cg.ops.ReGLU()(torch.tensor([[1.0, 2.0, 0.5, 3.0]]))  # one half of the features gates the other
        tensor([[0.5000, 6.0000]])
    """

    activation_name = "reglu"


class SReLU(ActivationOperation):
    """``max(x, 0)²``

    Examples:
        >>> cg.ops.SReLU()(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
        tensor([0., 0., 1., 4.])
    """

    activation_name = "srelu"


class SReGLU(ActivationOperation):
    """``srelu(gate) · linear``

    Examples:
        >>> cg.ops.SReGLU()(torch.tensor([[1.0, 2.0, 0.5, 3.0]]))  # one half of the features gates the other
        tensor([[ 0.5000, 12.0000]])
    """

    activation_name = "sreglu"


class SiLU(ActivationOperation):
    """``x · sigmoid(x)``

    Examples:
        >>> cg.ops.SiLU()(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
        tensor([-0.2689,  0.0000,  0.7311,  1.7616])
    """

    activation_name = "silu"


class SwiGLU(ActivationOperation):
    """``silu(gate) · linear``, where gate and linear are the halves of the last dimension.

    Args:
        cache_quantized_input: keep the input for backward in FP8.
        glu_interleave_size: gate and linear alternate in blocks of this size, instead of being two halves.

    Examples:
        >>> cg.ops.SwiGLU()(torch.tensor([[1.0, 2.0, 0.5, 3.0]]))  # one half of the features gates the other
        tensor([[0.3655, 5.2848]])
    """

    activation_name = "swiglu"

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, interleave=glu_interleave_size)
        self.glu_interleave_size = glu_interleave_size


class ClampedSwiGLU(ActivationOperation):
    """``z · sigmoid(alpha·z) · (clamp(linear, ±limit) + glu_linear_offset)`` with z = min(gate, limit), as in GPT-OSS.

    Args:
        limit: bound of gate and linear.
        alpha: factor inside the sigmoid.
        glu_linear_offset: added to the linear part.
        cache_quantized_input: keep the input for backward in FP8.
        glu_interleave_size: gate and linear alternate in blocks of this size, instead of being two halves.

    Examples:
        >>> cg.ops.ClampedSwiGLU()(torch.tensor([[1.0, 2.0, 0.5, 3.0]]))  # one half of the features gates the other
        tensor([[1.2687, 7.7426]])
    """

    activation_name = "clamped_swiglu"

    def __init__(
        self,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            cache_quantized_input=cache_quantized_input,
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
            interleave=glu_interleave_size,
        )
        self.glu_interleave_size = glu_interleave_size


class SiTUGLU(ActivationOperation):
    """``β₁·tanh(gate/β₁)·sigmoid(gate) · β₂·tanh(linear/β₂)``

    Examples:
        >>> cg.ops.SiTUGLU()(torch.tensor([[1.0, 2.0, 0.5, 3.0]]))  # one half of the features gates the other
        tensor([[0.3581, 4.8611]])
    """

    activation_name = "situglu"

    def __init__(
        self,
        beta1: float = 4.0,
        beta2: float = 25.0,
        *,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            cache_quantized_input=cache_quantized_input, beta1=beta1, beta2=beta2, interleave=glu_interleave_size
        )
        self.glu_interleave_size = glu_interleave_size
