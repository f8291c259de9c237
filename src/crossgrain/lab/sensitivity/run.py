"""`Run`: what all parts of one measurement share: the model, the batches, and how losses and gradients are computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..intervals import Estimate
from ..progress import Progress
from .adam import GradientWeights
from .borrowed import BorrowedModel
from .candidates import Candidate
from .result import Effect, Sensitivity, Site
from .sketch import Sketches
from .tokens import TokenCount

_SAME = 1e-4  # of the same pass; more than what a GPU adds in another order

LossFunction = Callable[[nn.Module, Any], Tensor]


class Run:
    """One measurement.

    Attributes:
        lent: the model.
        batches: the batches.
        tokens: how tokens of a batch are counted.
        weights: how gradients are weighed.
        sketches: makes the sketches.
        token_counts: number of tokens of each batch.
        label_counts: number of labels of each batch, also of those that are ignored; 0 if they are not known.
        losses: the loss of each batch; empty before it is known.
        has_labels: the loss is one for classes, whose labels can be drawn.
        seed: seed of all random numbers.
        result: the results so far.
        progress: where progress is shown.
    """

    def __init__(
        self,
        lent: BorrowedModel,
        batches: list[Any],
        loss_fn: LossFunction,
        tokens: TokenCount,
        optimizer: torch.optim.Optimizer | None,
        seed: int,
        result: Sensitivity,
        progress: Progress,
    ) -> None:
        self.lent, self.batches, self.tokens = lent, batches, tokens
        self.result, self.progress = result, progress
        self.weights = GradientWeights(optimizer, lent.trained.values())
        self.sketches = Sketches()
        self.token_counts: list[float] = []
        self.label_counts: list[int] = []
        self.losses: list[float] = []
        self.has_labels = False
        self.seed = seed
        self._loss_fn = loss_fn

    def backward(self, at: int, *, same_loss: bool = True) -> float:
        """Compute the gradients of a batch, with the same random numbers each time, and return its loss.

        Args:
            at: number of the batch.
            same_loss: the forward pass is that of high precision, with the labels of the data.

        Raises:
            ValueError: the loss is not a finite number that depends on the parameters, or is not what it was before.
        """
        torch.manual_seed(self.seed + at)  # of dropout
        self.lent.clear_gradients()
        loss = self._loss_fn(self.lent.model, self.batches[at])
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(f"loss_fn must return one number that depends on the parameters, got {loss!r}")
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ValueError(
                f"the loss of batch {at} is {value} in high precision, so nothing can be measured there: look at the "
                "weights and at the batch"
            )
        if same_loss and self.losses and not math.isclose(value, self.losses[at], rel_tol=_SAME):
            raise ValueError(
                f"the loss of batch {at} was {self.losses[at]} and is {value} now, with the same weights: loss_fn must "
                "not change its batch, and random numbers must come from torch's default generator"
            )
        loss.backward()
        return value

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients of the trained parameters by name, taken away from the parameters: nothing is copied.

        Raises:
            ValueError: there are none.
        """
        found = {name: own.grad for name, own in self.lent.trained.items() if own.grad is not None}
        self.lent.clear_gradients()
        if not found:
            raise ValueError("no parameter of this model is trained, so there is no gradient to measure")
        return found

    def square_and_sketch(
        self, gradients: dict[str, Tensor], minus: dict[str, Tensor] | None = None
    ) -> tuple[float, Tensor]:
        """The sum of squares of gradients, weighed as the optimizer does, and their sketch.

        Args:
            gradients: by name of the parameter. They are used up, one after the other, so that memory stays small.
            minus: other gradients to subtract first.
        """
        sketch = self.sketches.empty(next(iter(gradients.values())).device)
        total = 0.0
        while gradients:
            name, gradient = gradients.popitem()
            root = self.weights.root(self.lent.trained[name])
            if root is None:
                continue
            other = None if minus is None else minus.get(name)
            weighed = gradient.float() if other is None else gradient.float() - other
            weighed = weighed / root
            total += float(weighed.square().sum(dtype=torch.float64))
            self.sketches.add(sketch, name, weighed)
        return total, sketch

    def exact(self) -> Estimate:
        """The effect of what is in high precision: none."""
        return Estimate(0.0, 0.0, 0.0, len(self.batches))

    def say(self, note: str) -> None:
        """Add a note to the results, once."""
        if note not in self.result.notes:
            self.result.notes.append(note)

    def note(self, layer: str, gemm: str, candidate: Candidate, effect: Effect) -> None:
        """Add an effect to the results."""
        self.result.effects.setdefault(Site(layer, gemm), {})[candidate.label] = effect
