"""`ReplayStep`: one step of a training run, as a function of a user's returns it to ``crossgrain replay``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass
class ReplayStep:
    """A step that can be repeated: everything is as it was right before the forward pass.

    >>> def step(path):                                # in train.py; crossgrain replay run/checkpoints -s train:step
    ...     model, optimizer, data = build()
    ...     load_checkpoint(path, model=model, optimizer=optimizer, data=data)
    ...     return ReplayStep(model, [next(data)], lambda model, batch: model(**batch).loss, optimizer)

    Attributes:
        model: the model at the checkpoint: converted; or of crossgrain's modules, if ``loss_fn`` enters an autocast.
        batches: the microbatches of the step, whose gradients add up; mostly one.
        loss_fn: ``loss_fn(model, batch)`` returns the loss of a microbatch, divided as the training loop divides it.
        optimizer: the optimizer with its state, to see what the update does; None not to look at that.
        update: what the loop does after backward, such as clipping gradients and ``optimizer.step()``. By default
            ``optimizer.step()`` alone.
    """

    model: nn.Module
    batches: list[Any]
    loss_fn: LossFunction
    optimizer: torch.optim.Optimizer | None = None
    update: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.batches, list) or not self.batches:
            raise TypeError(
                f"batches must be a list with the microbatches of the step, mostly one: [batch]; got "
                f"{'an empty list' if isinstance(self.batches, list) else type(self.batches).__name__}"
            )
        if self.update is not None and self.optimizer is None:
            raise ValueError("update needs the optimizer, whose state is restored after each run: pass it, too")
