"""`FusedAdam`: Adam and AdamW with float32 master weights, using torch's fused kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import FusedOptimizer


class FusedAdam(FusedOptimizer):
    """Adam and AdamW for quantized and ordinary parameters.

    On plain float32 parameters the results are those of torch's ``AdamW(fused=True)``, bit for bit. All parameters of a
    group share one step count.

    Args:
        params: parameters or parameter groups, as for any torch optimizer.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: weight decay.
        amsgrad: not supported; must be False.
        bias_correction: correct the moments for the first steps.
        adam_w_mode: decay the weights themselves (AdamW); otherwise add the decay to the gradient (L2 regularisation).
        capturable: keep the step count in a tensor.
        master_weights: keep masters of parameters that are not float32. Quantized parameters need it.
        master_weight_dtype: ``torch.float32`` or ``torch.float16``.
        exp_avg_dtype: dtype that the first moment is stored in: float32, bfloat16, float16, or uint8 for FP8.
        exp_avg_sq_dtype: the same for the second moment.
        use_decoupled_grad: read gradients from ``param.decoupled_grad`` instead of ``param.grad``.
        store_param_remainders: for plain bfloat16 parameters, store only the 16 bits of the master that the parameter
            does not have.
        set_grad_none: whether `zero_grad` sets gradients to None; True by default.

    Raises:
        RuntimeError: options are not supported, or do not fit together.

    Examples:
        >>> with cg.quantized_model_init(recipe="mxfp8"):
        ...     layer = cg.Linear(32, 32)
        >>> optimizer = cg.optim.FusedAdam(layer.parameters(), lr=1e-3, master_weights=True)
        >>> layer(torch.randn(4, 32)).sum().backward()
        >>> optimizer.step()  # masters in float32 are updated, and the weight is quantized from them
        >>> optimizer.state[layer.weight]["master_param"].dtype
        torch.float32
    """

    _travelling = (*FusedOptimizer._travelling, "adam_w_mode", "capturable")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support amsgrad=True")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(
            params,
            defaults,
            moment_dtypes={"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype},
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=store_param_remainders,
            set_grad_none=set_grad_none,
        )
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if isinstance(group.get("step"), Tensor):
                group["step"] = group["step"].to(group["params"][0].device)

    def _begin(self, group: dict[str, Any]) -> None:
        step = group.get("step", 0)
        if self.capturable and not isinstance(step, Tensor):
            step = torch.full((1,), step, dtype=torch.int32, device=group["params"][0].device)
        step += 1
        group["step"] = step

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        first: bool,
    ) -> None:
        # After infinitely many steps both corrections are 1.
        steps = group["step"] if group["bias_correction"] else torch.inf
        if isinstance(steps, Tensor):
            count = steps.to(params[0].device, torch.float32).view(())
        else:
            count = torch.full((), float(steps), dtype=torch.float32, device=params[0].device)
        fused = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        beta1, beta2 = group["betas"]
        fused(
            params,
            grads,
            moments[0],
            moments[1],
            [],
            [count] * len(params),
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
