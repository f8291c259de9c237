"""Activation functions and their derivatives, for modules and fusible operations.

Plain activations map x to f(x). Gated activations divide the last dimension into a gate and a linear half, and return
f(gate) · g(linear). All are computed in fp32 (fp64 for fp64 inputs) and returned in the dtype of the input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pointwise(NamedTuple):
    """A function and its derivative."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """An activation function: ``y = f(x)``, or gated ``y = f(gate) · linear(rest)`` of the two halves of x.

    Attributes:
        function: f.
        linear: the function of the linear half; None if the activation is not gated.
        interleave: gate and linear half alternate in blocks of this size; None if they are contiguous.
    """

    function: Pointwise
    linear: Pointwise | None = None
    interleave: int | None = None

    @property
    def gated(self) -> bool:
        """Whether the activation is gated."""
        return self.linear is not None

    def forward(self, x: Tensor) -> Tensor:
        """Compute y, which has half the features of x if the activation is gated."""
        wide = x.to(compute_dtype(x))
        if self.linear is None:
            return self.function.value(wide).to(x.dtype)
        gate, rest = self._halves(wide)
        return (self.function.value(gate) * self.linear.value(rest)).to(x.dtype)

    def backward(self, dy: Tensor, x: Tensor) -> Tensor:
        """Compute dx."""
        wide = x.to(compute_dtype(x))
        dy = dy.to(wide.dtype)
        if self.linear is None:
            return (dy * self.function.derivative(wide)).to(x.dtype)
        gate, rest = self._halves(wide)
        d_gate = dy * self.function.derivative(gate) * self.linear.value(rest)
        d_rest = dy * self.function.value(gate) * self.linear.derivative(rest)
        return self._joined(d_gate, d_rest).to(x.dtype)

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = 2 * (self.interleave or 1)
        if x.shape[-1] % step:
            raise ValueError(
                f"the last dimension of the input of a gated activation must be a multiple of {step}, got shape "
                f"{list(x.shape)}"
            )
        if self.interleave is not None:
            x = deinterleaved(x, self.interleave)
        gate, rest = x.chunk(2, dim=-1)
        return gate, rest

    def _joined(self, gate: Tensor, rest: Tensor) -> Tensor:
        joined = torch.cat((gate, rest), dim=-1)
        return joined if self.interleave is None else interleaved(joined, self.interleave)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which sums and nonlinear functions of ``x`` are computed."""
    return wide_dtype(x.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of ``dtype`` are added up: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def interleaved(x: Tensor, size: int) -> Tensor:
    """Rearrange [gate | linear] into alternating blocks of ``size``."""
    blocks = x.shape[-1] // (2 * size)
    return x.reshape(*x.shape[:-1], 2, blocks, size).transpose(-3, -2).reshape(x.shape)


def deinterleaved(x: Tensor, size: int) -> Tensor:
    """The inverse of `interleaved`."""
    blocks = x.shape[-1] // (2 * size)
    return x.reshape(*x.shape[:-1], blocks, 2, size).transpose(-3, -2).reshape(x.shape)


# ---- functions ---------------------------------------------------------------------------------------

_GELU_SLOPE = math.sqrt(2 / math.pi)  # of the usual tanh approximation of GELU
_GELU_CUBIC = 0.044715
_QGELU_SLOPE = 1.702  # the slope with which x·sigmoid(slope·x) approximates GELU


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _gelu_derivative(x: Tensor) -> Tensor:
    t = torch.tanh(_GELU_SLOPE * (x + _GELU_CUBIC * x**3))
    slope = _GELU_SLOPE * (1 + 3 * _GELU_CUBIC * x**2)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * slope


def _scaled_silu(slope: float, x: Tensor) -> Tensor:
    return x * torch.sigmoid(slope * x)


def _scaled_silu_derivative(slope: float, x: Tensor) -> Tensor:
    s = torch.sigmoid(slope * x)
    return s + slope * x * s * (1 - s)


def _sigmoid_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _swish(slope: float) -> Pointwise:
    return Pointwise(functools.partial(_scaled_silu, slope), functools.partial(_scaled_silu_derivative, slope))


def _clamped(inner: Pointwise, low: float, high: float) -> Pointwise:
    """``inner`` of the clamped input. The derivative is zero outside of the limits."""
    return Pointwise(
        lambda x: inner.value(x.clamp(low, high)),
        lambda x: inner.derivative(x.clamp(low, high)) * ((x >= low) & (x <= high)),
    )


def _shifted(offset: float) -> Pointwise:
    return Pointwise(lambda x: x + offset, torch.ones_like)


def _soft_capped(cap: float) -> Pointwise:
    return Pointwise(lambda x: cap * torch.tanh(x / cap), lambda x: 1 - torch.tanh(x / cap) ** 2)


def _product(a: Pointwise, b: Pointwise) -> Pointwise:
    return Pointwise(
        lambda x: a.value(x) * b.value(x),
        lambda x: a.derivative(x) * b.value(x) + a.value(x) * b.derivative(x),
    )


_LINEAR = Pointwise(lambda x: x, torch.ones_like)
_GELU = Pointwise(_gelu, _gelu_derivative)
_RELU = Pointwise(torch.relu, lambda x: (x > 0).to(x.dtype))
_SRELU = Pointwise(lambda x: torch.relu(x) ** 2, lambda x: 2 * torch.relu(x))
_SIGMOID = Pointwise(torch.sigmoid, _sigmoid_derivative)
_SILU = _swish(1.0)
_QGELU = _swish(_QGELU_SLOPE)

_FUNCTIONS: dict[str, Pointwise] = {"gelu": _GELU, "qgelu": _QGELU, "relu": _RELU, "srelu": _SRELU, "silu": _SILU}
_GATES: dict[str, Pointwise] = {
    "glu": _SIGMOID,
    "geglu": _GELU,
    "qgeglu": _QGELU,
    "reglu": _RELU,
    "sreglu": _SRELU,
    "swiglu": _SILU,
}


def clamped_swiglu(
    limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, interleave: int | None = None
) -> Activation:
    """The gated activation ``z·sigmoid(alpha·z) · (clamp(linear, ±limit) + offset)`` with z = min(gate, limit)."""
    gate = _clamped(_swish(alpha), -math.inf, limit)
    return Activation(gate, _clamped(_shifted(glu_linear_offset), -limit, limit), interleave)


def situglu(beta1: float = 4.0, beta2: float = 25.0, interleave: int | None = None) -> Activation:
    """SwiGLU with soft limits of both halves: ``β₁·tanh(gate/β₁)·sigmoid(gate) · β₂·tanh(linear/β₂)``."""
    return Activation(_product(_soft_capped(beta1), _SIGMOID), _soft_capped(beta2), interleave)


ACTIVATIONS = (*_FUNCTIONS, *_GATES, "clamped_swiglu", "situglu")


def activation(name: str, **options: Any) -> Activation:
    """Return an activation by name.

    Args:
        name: one of `ACTIVATIONS`.
        **options: ``interleave`` for gated activations; also the arguments of `clamped_swiglu` and `situglu`.

    Raises:
        ValueError: there is no activation of this name.
        TypeError: the activation does not have an option.
    """
    if name in _FUNCTIONS and not options:
        return Activation(_FUNCTIONS[name])
    if name in _GATES:
        return Activation(_GATES[name], _LINEAR, **options)
    if name == "clamped_swiglu":
        return clamped_swiglu(**options)
    if name == "situglu":
        return situglu(**options)
    if name in _FUNCTIONS:
        raise TypeError(f"the activation {name} has no options, got {', '.join(options)}")
    raise ValueError(f"there is no activation {name!r}; available: {', '.join(ACTIVATIONS)}")
