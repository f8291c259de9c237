"""Adam and AdamW on float32 masters, through torch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import FusedOptimizer


class FusedAdam(FusedOptimizer):
    """Adam (``adam_w_mode=False``: with L2 regularisation) for quantized and ordinary parameters.

    ``master_weights``          keep float32 masters of parameters that are not float32; quantized ones need it
    ``exp_avg_dtype``, ``exp_avg_sq_dtype``   float32, bfloat16, float16 or uint8 (see `stored_state`)
    ``store_param_remainders``  bfloat16 parameters: keep only the 16 bits of the master that they lack
    ``use_decoupled_grad``      read ``param.decoupled_grad`` instead of ``param.grad``
    ``capturable``              keep the step count in a tensor

    One count of steps serves a whole group.
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
            raise RuntimeError("FusedAdam has no AMSGrad variant")
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

    def _begin(self, group: dict[str, Any]) -> None:
        step = group.get("step", 0)
        if self.capturable and not isinstance(step, Tensor):
            step = torch.tensor([step], dtype=torch.int32)
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
        count = torch.tensor(float(group["step"]) if group["bias_correction"] else torch.inf, device=params[0].device)
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
