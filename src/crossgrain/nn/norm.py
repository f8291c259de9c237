"""`LayerNorm` and `RMSNorm`. The computation is in `crossgrain.gemm.norms`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..gemm.norms import normalize, normalize_backward
from ..linear.call import activation_dtype
from ..linear.parallel import mark_sequence_parallel
from ..runtime.transforms import refuse_transforms
from ..tensor import QuantizedTensor
from .options import parameter_options

Normalization = Literal["LayerNorm", "RMSNorm"]
NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def normalized(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, zero_centered_gamma: bool, dtype: torch.dtype
) -> Tensor:
    """Normalize x over its last dimensions, which have the shape of ``weight``. Without a bias it is RMSNorm."""
    if tuple(x.shape[x.dim() - weight.dim() :]) != tuple(weight.shape):
        raise ValueError(
            f"the last dimensions of the input to normalize must be {list(weight.shape)}, got an input of shape "
            f"{list(x.shape)}"
        )
    if isinstance(x, QuantizedTensor):
        x = x.dequantize()
    if not torch.compiler.is_compiling():
        refuse_transforms("a norm of crossgrain")
    result: Tensor = _NormFunction.apply(x.to(dtype), weight, bias, eps, zero_centered_gamma)
    return result


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
        done = normalize(x, weight, bias, eps, zero_centered)
        ctx.save_for_backward(x, weight, done.mean, done.rstd)
        ctx.eps, ctx.zero_centered, ctx.bias_dtype = eps, zero_centered, None if bias is None else bias.dtype
        return done.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph is asked for, in which the statistics depend on x
            _, mean, rstd = normalize(x, weight, None if mean is None else weight, ctx.eps, ctx.zero_centered)
        dx, dw, db = normalize_backward(dy, x, weight, mean, rstd, ctx.zero_centered)
        return dx, dw, None if ctx.bias_dtype is None else db.to(ctx.bias_dtype), None, None


class NormParameters(nn.Module):
    """The parameters of a norm over the last dimensions, of modules and of operations."""

    _has_bias: ClassVar[bool] = False
    weight: nn.Parameter
    bias: nn.Parameter | None

    def _make_parameters(
        self, shape: int | Iterable[int], eps: float, zero_centered_gamma: bool, factory: Mapping[str, Any]
    ) -> None:
        self.normalized_shape: tuple[int, ...] = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        for name in ("weight", "bias") if self._has_bias else ("weight",):
            self.register_parameter(name, nn.Parameter(torch.empty(self.normalized_shape, **factory)))
        self._initialise()

    def _initialise(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        bias = getattr(self, "bias", None)
        if bias is not None:
            nn.init.zeros_(bias)

    def _materialise(self, device: torch.device | str) -> None:
        """Give parameters on the meta device memory on ``device``."""
        for name, parameter in list(self.named_parameters()):
            if parameter.is_meta:
                setattr(self, name, nn.Parameter(torch.empty_like(parameter, device=device)))

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class _Norm(NormParameters):
    """Base class of norms over the last dimensions.

    Args:
        normalized_shape: shape of the last dimensions of the input.
        eps: added to the variance.
        sequence_parallel: mark the parameters ``sequence_parallel``, for functions that reduce gradients over ranks.
        params_dtype: dtype of the parameters.
        zero_centered_gamma: the parameter is the difference of the weight from 1.
        hidden_size: older name of ``normalized_shape``.
        device: device of the parameters.
        dtype: another name of ``params_dtype``.
    """

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise ValueError(
                f"{type(self).__name__} needs one of normalized_shape and hidden_size, not both or neither"
            )
        if params_dtype is not None and dtype is not None and params_dtype != dtype:
            raise ValueError(
                f"params_dtype={params_dtype} and dtype={dtype} differ; they mean the same, so pass only one"
            )
        shape: Any = hidden_size if normalized_shape is None else normalized_shape
        self.sequence_parallel = sequence_parallel
        if not self._has_bias:
            self.bias = None
        self._make_parameters(shape, eps, zero_centered_gamma, parameter_options(params_dtype or dtype, device))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Set the weight to 1 and the bias to 0. Parameters on the meta device get memory on the default device."""
        if defer_init:
            return
        self._materialise(torch.get_default_device())
        self._initialise()

    def _initialise(self) -> None:
        super()._initialise()
        if self.sequence_parallel is not None:
            mark_sequence_parallel(self, marked=self.sequence_parallel)

    def forward(self, inp: Tensor) -> Tensor:
        """Return the normalized input, in its dtype or that of torch.autocast."""
        return normalized(
            inp,
            self.weight,
            self.bias,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
            dtype=activation_dtype(inp),
        )


class LayerNorm(_Norm):
    """``y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias``

    Examples:
        >>> norm = cg.LayerNorm(32)
        >>> norm(torch.randn(4, 32)).shape
        torch.Size([4, 32])
    """

    _has_bias = True


class RMSNorm(_Norm):
    """``y = x / sqrt(mean(x²) + eps) · weight``

    Examples:
        >>> norm = cg.RMSNorm(32)
        >>> norm(torch.randn(4, 32)).shape
        torch.Size([4, 32])
    """
