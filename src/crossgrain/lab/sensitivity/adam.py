"""How an optimizer weighs gradients: Adam divides each number by the root of its second moment.

An error in a number that Adam divides by a small one moves the weight further, so squares of errors are divided by that
number. Optimizers without second moments, such as SGD, weigh all numbers alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_MOMENTS = ("exp_avg_sq", "square_avg")  # of Adam and its relatives, and of RMSprop
_EPS = 1e-8


class GradientWeights:
    """Divisors of squared gradients, by parameter.

    Args:
        optimizer: the optimizer of the training run with its state; None to weigh all numbers alike.
        parameters: the parameters that are measured.

    Attributes:
        note: what users have to know about the weights; empty if there is nothing to say.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, parameters: Iterable[Tensor]) -> None:
        self._optimizer = optimizer
        self._groups: dict[int, dict[str, Any]] = {}
        if optimizer is not None:
            self._groups = {id(own): group for group in optimizer.param_groups for own in group["params"]}
        self.note = self._described(list(parameters))

    def _described(self, parameters: list[Tensor]) -> str:
        if self._optimizer is None:
            return "no optimizer was given: noise and bias weigh all numbers of a gradient alike"
        known = sum(self._moment(own) is not None for own in parameters)
        name = type(self._optimizer).__name__
        if not known:
            return (
                f"the state of {name} has no second moments (it has made no step, or has none): noise and bias weigh "
                "all numbers of a gradient alike"
            )
        if known < len(parameters):
            missing = len(parameters) - known
            return f"{name} has no second moments of {missing} of {len(parameters)} parameters, which are left out"
        return ""

    @property
    def is_plain(self) -> bool:
        """Whether all numbers are weighed alike."""
        return self.note.endswith("alike")

    def _moment(self, parameter: Tensor) -> Tensor | None:
        if self._optimizer is None or id(parameter) not in self._groups:
            return None
        state = self._optimizer.state.get(parameter, {})
        get_scaled = getattr(self._optimizer, "get_unscaled_state", None)  # moments that are kept in 8 bits
        for name in _MOMENTS:
            if name in state:
                value = state[name] if get_scaled is None else get_scaled(parameter, name)
                return value if isinstance(value, Tensor) else None
        return None

    def root(self, parameter: Tensor) -> Tensor | None:
        """What gradients of this parameter are divided by, so that squares of the quotients can be added.

        This is the fourth root of the second moment, without the bias of Adam's first steps. None if the parameter is
        left out.
        """
        if self.is_plain:
            return torch.ones((), device=parameter.device)
        moment = self._moment(parameter)
        if moment is None:
            return None
        group = self._groups[id(parameter)]
        step = float(self._optimizer.state[parameter].get("step", group.get("step", 0)))  # type: ignore[union-attr]
        missing = group["betas"][1] ** step if step and "betas" in group else 0.0  # RMSprop corrects nothing
        corrected = moment.float() / (1 - missing)  # a new tensor: the state stays
        return corrected.sqrt_().add_(float(group.get("eps", _EPS))).sqrt_()
