"""`FusedSGD`: SGD with momentum and float32 master weights, using torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import FusedOptimizer
from .masters import is_quantized


class FusedSGD(FusedOptimizer):
    """SGD for quantized and ordinary parameters. Quantized parameters always have float32 masters.

    Args:
        params: parameters or parameter groups, as for any torch optimizer.
        lr: learning rate.
        momentum: factor of the momentum; 0 for none.
        dampening: dampening of the momentum.
        weight_decay: weight decay.
        nesterov: use Nesterov momentum, which needs a momentum and no dampening.
        wd_after_momentum: decay the weight itself, instead of adding the decay to the gradient.
        materialize_master_grads: accepted and ignored; gradients are always converted to float32.
        master_weights: keep masters of 16-bit parameters too.
        set_grad_none: whether `zero_grad` sets gradients to None; True by default.

    Raises:
        ValueError: ``nesterov`` without momentum or with dampening.

    Examples:
        >>> layer = cg.Linear(32, 32)
        >>> optimizer = cg.optim.FusedSGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.randn(4, 32)).sum().backward()
        >>> optimizer.step()
    """

    _travelling = (*FusedOptimizer._travelling, "wd_after_momentum", "_masters_of_plain")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        master_weights: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"Nesterov momentum needs momentum > 0 and dampening = 0, got momentum={momentum} and "
                f"dampening={dampening}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(
            params,
            defaults,
            moment_dtypes={"momentum_buffer": torch.float32},
            master_weights=True,
            set_grad_none=set_grad_none,
        )
        self.wd_after_momentum = wd_after_momentum
        self._masters_of_plain = master_weights
        self._begin(self.defaults)

    def _needs_master(self, param: Tensor) -> bool:
        return super()._needs_master(param) and (self._masters_of_plain or is_quantized(param))

    def _begin(self, group: dict[str, Any]) -> None:
        self._moments = ("momentum_buffer",) if group["momentum"] else ()

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        first: bool,
    ) -> None:
        decay = group["weight_decay"]
        if self.wd_after_momentum:
            torch._foreach_mul_(params, 1 - float(group["lr"]) * decay)
            decay = 0.0
        torch._fused_sgd_(
            params,
            grads,
            moments[0] if moments else [],
            weight_decay=decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=first,
        )
