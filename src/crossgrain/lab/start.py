"""`Start`: a model of a user's, its data and its loop, as the commands of the lab get them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..recipe import GemmRecipe


@dataclass
class Start:
    """Everything that the lab needs of a training run.

    >>> def start():                                          # in train.py; crossgrain search --from train:start
    ...     model, optimizer = load_checkpoint()
    ...     return Start(model, batches, lambda model, batch: model(**batch).loss, optimizer, branch)

    Attributes:
        model: the model at the checkpoint.
        batches: batches of training data.
        loss_fn: ``loss_fn(model, batch)``, see `sensitivity`.
        optimizer: the optimizer with its state, if there is one.
        branch: ``branch(recipe, seed)``, see `verify`; None if nothing is to be trained.
        include: layers to change that stay in high precision by default, see `convert`.
        skip: layers to leave alone, see `convert`.
        tokens: tokens of a batch, see `sensitivity`.
        steps: number of steps that a branch is meant for.
        name: what reports call the model.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    branch: Callable[[GemmRecipe | None, int], Iterable[float]] | None = None
    include: Any = ()
    skip: Any = ()
    tokens: Any = None
    steps: int = 60
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            self.name = type(self.model).__name__
