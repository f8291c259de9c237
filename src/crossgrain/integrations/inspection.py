"""What the Inspector callbacks of training programs have in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..lab.inspect import Inspector
from ..lab.inspect.inspector import Where
from .wrappers import unwrapped


class InspectedTraining:
    """An `Inspector` that a training program opens, steps and closes.

    Args:
        to: where to write, as for `crossgrain.lab.Inspector`.
        options: further arguments of the Inspector.

    Attributes:
        inspector: the Inspector of the run; None before training begins. It stays after the end, for its report.
    """

    def __init__(self, to: Where, options: dict[str, Any]) -> None:
        self._to = to
        self._options = options
        self.inspector: Inspector | None = None
        Inspector(nn.Module(), **options)  # refuses wrong arguments now, not when training begins

    def begin(self, model: nn.Module, step: int) -> None:
        """Training begins with a step. A run that was not ended, because of an error, is ended first."""
        self.end(failed=True)
        self.inspector = Inspector(unwrapped(model), self._to, first_step=step, **self._options)
        self.inspector.open()

    def end_step(self) -> None:
        """The optimizer has made a step."""
        if self.inspector is not None:
            self.inspector.step()

    def end(self, *, failed: bool = False) -> None:
        """Training ends."""
        if self.inspector is not None:
            self.inspector.close(failed)
