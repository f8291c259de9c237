"""Run one step again and again, each time from the same state and with the same random numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...files.random_state import get_random_state, set_random_state
from ...files.undo import Restore, remembered
from ...linear.raised import Choose, QuantizedOperand, raising
from ...nn.base import name_layers
from ...quantizers.nonfinite import NonfiniteError
from ...runtime.random_numbers import DrawRecord
from .looking import Look, Site
from .outcome import Outcome, cosine, count_nonfinite, distances, norm, same_bits
from .step import ReplayStep

_MOST_NAMES = 3  # in messages
_UNNAMED = (
    " Or the rules of the recipe: some layers have no names, and got the names of their paths for the second run. Call "
    "crossgrain.nn.name_layers(model) before training to have names in both."
)


class ReplayError(RuntimeError):
    """A step is not the same when it is repeated, so that nothing could be said about what changes it."""


class Made(NamedTuple):
    """A run: what came of it, and its gradients by the name of the parameter."""

    outcome: Outcome
    gradients: dict[str, Tensor]


class Runs:
    """Runs of one step.

    Args:
        step: the step.
        random_state: the states of all random number generators at its beginning, as `get_random_state` returns them;
            None for the present ones.

    Attributes:
        count: number of runs so far.
        draws: the seeds of stochastic rounding of the step.
        high: the run in high precision, which all others are compared with; None before it.
    """

    def __init__(self, step: ReplayStep, random_state: Mapping[str, Any] | None = None) -> None:
        self.count = 0
        self.draws = DrawRecord()
        self.high: Made | None = None
        self._step = step
        self._random_state = get_random_state() if random_state is None else random_state
        self._parameters = {name: own for name, own in step.model.named_parameters() if own.requires_grad}
        self._unnamed: list[Any] = []
        self._restores: list[Restore] = []

    @contextmanager
    def of_present_state(self) -> Iterator[Runs]:
        """Context manager: runs inside begin with the present state. At its end everything is as it was before."""
        step, before = self._step, get_random_state()
        gradients = {own: own.grad for own in step.model.parameters()}
        main_grads = [(own, own.main_grad, own.main_grad.clone()) for own in _with_main_grad(step.model)]
        self._restores = [remembered(step.model)]
        if step.optimizer is not None:
            self._restores.append(remembered(step.optimizer))
        try:
            yield self
        finally:
            for restore in self._restores:
                restore()
            for own, gradient in gradients.items():
                own.grad = gradient
            for own, buffer, kept in main_grads:
                own.main_grad = buffer.copy_(kept)
            for module in self._unnamed:
                module.name = None
            set_random_state(before)

    # ---- runs --------------------------------------------------------------------------------------------------

    def twice(self) -> tuple[Made, Look]:
        """Run the step as it is, two times. The seeds of the second run are recorded.

        Returns:
            The second run, and the operands that were seen in it.

        Raises:
            ReplayError: the two runs are not the same, bit for bit.
        """
        first = self._run(None, self.draws.recording())
        modules = [own for own in self._step.model.modules() if hasattr(own, "get_quantizer_roles")]
        self._unnamed = [own for own in modules if getattr(own, "name", "") is None]
        name_layers(self._step.model)
        look = Look()
        again = self._run(look, self.draws.recording())
        self._check_same(first, again, renamed=bool(self._unnamed))
        return again, look

    def raised(self, sites: Collection[Site], *, variant: int = 0) -> Made:
        """Run the step with these operands in high precision."""
        chosen = frozenset(sites)

        def choose(operand: QuantizedOperand) -> bool:
            return Site(operand.layer, operand.name) in chosen

        return self._run(choose, self.draws.repeating(variant))

    def _run(self, choose: Choose | None, draws: AbstractContextManager[None]) -> Made:
        step = self._step
        self.count += 1
        for restore in self._restores:
            restore()
        for own in step.model.parameters():
            own.grad = None
        for own in _with_main_grad(step.model):
            own.main_grad.zero_()
        set_random_state(self._random_state)
        loss, loss_after, error = 0.0, None, ""
        with ExitStack() as contexts:
            contexts.enter_context(_eager())
            contexts.enter_context(draws)
            if choose is not None:
                contexts.enter_context(raising(choose))
            try:
                for batch in step.batches:
                    loss += self._backward(batch)
            except NonfiniteError as refused:
                loss, error = math.nan, str(refused)
        gradients = self._gradients()
        if step.optimizer is not None:
            loss_after = math.nan if error or count_nonfinite(gradients) else self._loss_after_update()
        return Made(self._outcome(loss, gradients, loss_after, error), gradients)

    def _backward(self, batch: Any) -> float:
        loss = self._loss(batch)
        if not loss.requires_grad:
            raise ValueError("the loss depends on no parameter that is trained, so there is no step to repeat")
        loss.backward()
        for module in self._step.model.modules():  # with delay_wgrad_compute, they wait for somebody to ask
            if getattr(module, "need_backward_dw", bool)():
                module.backward_dw()  # type: ignore[operator]
        return float(loss.detach())

    def _loss(self, batch: Any) -> Tensor:
        loss = self._step.loss_fn(self._step.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn must return one number, as a tensor, got {loss!r}")
        return loss

    def _loss_after_update(self) -> float:
        """The loss of the same batch after the update, in high precision, so that it shows the update alone."""
        step = self._step
        assert step.optimizer is not None
        (step.update or step.optimizer.step)()
        set_random_state(self._random_state)
        with torch.no_grad(), _eager(), raising(_everything):
            return sum(float(self._loss(batch)) for batch in step.batches)

    def _gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, own in self._parameters.items():
            main_grad = getattr(own, "main_grad", None)
            gradient = main_grad if isinstance(main_grad, Tensor) else own.grad
            if gradient is not None:
                found[name] = (gradient.to_dense() if gradient.is_sparse else gradient).detach().clone()
        return found

    def _outcome(self, loss: float, gradients: dict[str, Tensor], loss_after: float | None, error: str) -> Outcome:
        bad = count_nonfinite(gradients) + (not math.isfinite(loss))
        made = Outcome(loss, norm(gradients), None, None, loss_after, bad, error)
        return made if self.high is None else self.compared(Made(made, gradients)).outcome

    def compared(self, made: Made) -> Made:
        """A run with its distance to high precision."""
        assert self.high is not None
        apart = math.sqrt(sum(each**2 for each in distances(made.gradients, self.high.gradients).values()))
        angle = cosine(made.gradients, self.high.gradients)
        values = {**vars(made.outcome), "distance": apart, "cosine": angle}
        return made._replace(outcome=Outcome(**values))

    # ---- the same bits -----------------------------------------------------------------------------------------

    @staticmethod
    def _check_same(first: Made, again: Made, renamed: bool) -> None:
        differing = [
            name
            for name in {**first.gradients, **again.gradients}
            if name not in first.gradients
            or name not in again.gradients
            or not same_bits(first.gradients[name], again.gradients[name])
        ]
        a, b = first.outcome.loss, again.outcome.loss
        same_loss = a == b or (math.isnan(a) and math.isnan(b))
        if same_loss and not differing:
            return
        parts = [] if same_loss else [f"its loss is {a!r}, and then {b!r}"]
        if differing:
            shown = ", ".join(differing[:_MOST_NAMES]) + (", ..." if len(differing) > _MOST_NAMES else "")
            parts.append(f"{len(differing)} gradients differ ({shown})")
        raise ReplayError(
            f"the step is not the same when it is repeated: {'; '.join(parts)}. The model, its optimizer and the "
            "generators of torch, Python and numpy began both times in the same state. So something else is different: "
            "a generator of the model's own, an attribute that counts calls, a batch that is changed in "
            "place or read from an iterator, or an operation that is not deterministic; "
            f"torch.use_deterministic_algorithms(True) finds the last.{_UNNAMED * renamed}"
        )


def _eager() -> AbstractContextManager[Any]:
    """A context in which compiled models run as they are written: operands in a graph could not be changed."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _everything(operand: QuantizedOperand) -> bool:
    return True


def _with_main_grad(model: nn.Module) -> list[Any]:
    return [own for own in model.parameters() if isinstance(getattr(own, "main_grad", None), Tensor)]
